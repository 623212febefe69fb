package idempotencytest

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Records is an idempotencypgx.Records in memory, on transactions of
// txretrytest. Like every effect there, an inserted record is seen outside its
// transaction before the commit. It keeps records for ever, and is safe for
// concurrent use.
type Records struct {
	mu      sync.Mutex
	records map[idempotency.Key]idempotencypgx.Record
}

// NewRecords returns an empty table.
func NewRecords() *Records {
	return &Records{records: map[idempotency.Key]idempotencypgx.Record{}}
}

// Insert implements idempotencypgx.Records. A second record makes COMMIT fail as
// Postgres does, with SQLSTATE 23505.
func (r *Records) Insert(_ context.Context, tx pgx.Tx, rec idempotencypgx.Record) error {
	inserted := false
	err := txretrytest.Effect(tx, func() { inserted = r.add(rec) }, func() {
		if inserted {
			r.remove(rec.Key)
		}
	})
	if err != nil || inserted {
		return err
	}
	return txretrytest.FailAtCommit(tx, &pgconn.PgError{
		Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "23505",
		Message:        "duplicate key value violates unique constraint",
		ConstraintName: "holdfast_idempotency_pkey",
	})
}

// Lookup implements idempotencypgx.Records.
func (r *Records) Lookup(ctx context.Context, key idempotency.Key) (idempotencypgx.Record, bool, error) {
	if err := ctx.Err(); err != nil {
		return idempotencypgx.Record{}, false, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	rec, found := r.records[key]
	rec.Response = rec.Response.Clone()
	return rec, found, nil
}

// Resolve implements idempotencypgx.Records.
func (r *Records) Resolve(ctx context.Context, key idempotency.Key) (idempotencypgx.Record, bool, error) {
	return r.Lookup(ctx, key)
}

func (r *Records) add(rec idempotencypgx.Record) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, taken := r.records[rec.Key]; taken {
		return false
	}
	rec.Response = rec.Response.Clone()
	r.records[rec.Key] = rec
	return true
}

func (r *Records) remove(key idempotency.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.records, key)
}
