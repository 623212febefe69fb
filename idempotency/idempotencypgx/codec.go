package idempotencypgx

import (
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
)

// recordColumns are read by row.scan.
const recordColumns = `fingerprint_version, fingerprint, code, headers, body, token`

// row is a record as the table holds it.
type row struct {
	fingerprint driver.Fingerprint
	code        int
	headers     string
	body        []byte
	token       string
}

// recordOf reads the record of key, if there is one.
func recordOf(key driver.Key, found pgx.Row) (pgxdriver.Record, bool, error) {
	var r row
	err := found.Scan(r.fields()...)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return pgxdriver.Record{}, false, nil
	case err != nil:
		return pgxdriver.Record{}, false, err
	}
	return pgxdriver.Record{Key: key, Token: r.token, Fingerprint: r.fingerprint, Response: r.response()}, true, nil
}

// fields are the places for recordColumns, in their order.
func (r *row) fields() []any {
	return []any{&r.fingerprint.Version, &r.fingerprint.Sum, &r.code, &r.headers, &r.body, &r.token}
}

// response returns the stored response. What cannot be read is a tombstone:
// the work was done.
func (r *row) response() driver.Response {
	header, err := headers.Decode(r.headers)
	if err != nil {
		return driver.Response{}
	}
	return driver.Response{Status: r.code, Header: header, Body: r.body}
}
