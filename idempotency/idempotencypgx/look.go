package idempotencypgx

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// Look implements driver.Looker. It tells what the table knows: a Gate is asked by itself. Where
// Records are in place of the table it tells of no times.
func (s *Store) Look(ctx context.Context, key driver.Key) (driver.Known, error) {
	if err := key.Validate(); err != nil {
		return driver.Known{}, err
	}
	if s.table != nil {
		return s.table.look(ctx, key)
	}
	rec, found, err := s.records.Lookup(ctx, key)
	if err != nil || !found {
		return driver.Known{}, err
	}
	return driver.Known{State: driver.Completed, Fingerprint: rec.Fingerprint, Response: rec.Response}, nil
}

// look prefers the record of a transaction to the claim of its key, which is under way as long as the
// answer is, and to the claim's copy of the record.
func (t *table) look(ctx context.Context, key driver.Key) (driver.Known, error) {
	var r row
	var known driver.Known
	var completed bool
	err := t.asker.ask(ctx, false, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT `+recordColumns+`, status = 'completed', created_at,
				greatest(coalesce(lease_until, expires_at) - clock_timestamp(), interval '0')
			FROM `+t.name+` WHERE key = $1 AND status = 'completed'
				OR key = $2 AND coalesce(lease_until, expires_at) > clock_timestamp()
			ORDER BY key = $1 DESC LIMIT 1`, string(key), rowOf(driver.Claim{Key: key}),
		).Scan(append(r.fields(), &completed, &known.Since, &known.Left)...)
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return driver.Known{}, nil
	case err != nil:
		return driver.Known{}, fmt.Errorf("idempotencypgx: look: %w", err)
	}
	known.State, known.Fingerprint = driver.InProgress, r.fingerprint
	if completed {
		known.State, known.Response = driver.Completed, r.response()
	}
	return known, nil
}
