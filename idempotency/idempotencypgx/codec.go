package idempotencypgx

import (
	"github.com/holdfast-go/holdfast/idempotency/driver"
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
