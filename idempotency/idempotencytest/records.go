package idempotencytest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// New returns an idempotencypgx.Store whose records are in memory, for the
// transactions of txretrytest: as in Postgres, a record is visible from its
// commit on. cfg.Records and cfg.Lease must be zero.
func New(t txretry.Transactor, cfg idempotencypgx.Config) (*idempotencypgx.Store, error) {
	if cfg.Records != nil {
		return nil, errors.New("idempotencytest: Records is set")
	}
	r := newRecords()
	if cfg.Retention > 0 {
		r.retention = cfg.Retention
	}
	cfg.Records = r
	return idempotencypgx.New(t, cfg)
}

// records are a driver.Records in memory. They are safe for concurrent use.
type records struct {
	retention time.Duration

	mu      sync.Mutex
	records map[driver.Key]kept
	pending map[driver.Key]bool // inserted by a COMMIT that is not through
	sweepAt int                 // number of records at which the expired ones are dropped
}

type kept struct {
	pgxdriver.Record
	expires time.Time
}

func newRecords() *records {
	return &records{retention: retention, records: map[driver.Key]kept{}, pending: map[driver.Key]bool{}, sweepAt: firstSweep}
}

// Insert implements pgxdriver.Records. It takes effect with COMMIT, as the real one does, and a second
// record makes that fail as Postgres does, with SQLSTATE 23505.
func (r *records) Insert(_ context.Context, tx pgx.Tx, rec pgxdriver.Record) error {
	rec.Response = rec.Response.Clone()
	return txretrytest.EffectAtCommit(tx,
		func() error { return r.reserve(rec.Key) },
		func() { r.free(rec.Key) },
		func() { r.add(rec) })
}

func duplicate() error {
	return &pgconn.PgError{
		Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "23505",
		Message:        "duplicate key value violates unique constraint",
		ConstraintName: "holdfast_idempotency_pkey",
	}
}

// Lookup implements pgxdriver.Records.
func (r *records) Lookup(ctx context.Context, key driver.Key) (pgxdriver.Record, bool, error) {
	if err := ctx.Err(); err != nil {
		return pgxdriver.Record{}, false, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	rec, found := r.live(key)
	rec.Response = rec.Response.Clone()
	return rec.Record, found, nil
}

// Resolve implements pgxdriver.Records.
func (r *records) Resolve(ctx context.Context, key driver.Key) (pgxdriver.Record, bool, error) {
	return r.Lookup(ctx, key)
}

func (r *records) reserve(key driver.Key) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, taken := r.live(key); taken || r.pending[key] {
		return duplicate()
	}
	r.pending[key] = true
	return nil
}

func (r *records) free(key driver.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pending, key)
}

func (r *records) add(rec pgxdriver.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sweep()
	delete(r.pending, rec.Key)
	r.records[rec.Key] = kept{rec, time.Now().Add(r.retention)}
}

// live returns the record unless its retention is over.
func (r *records) live(key driver.Key) (kept, bool) {
	rec, found := r.records[key]
	if !found || !time.Now().Before(rec.expires) {
		return kept{}, false
	}
	return rec, true
}

// sweep drops expired records whenever their number has doubled.
func (r *records) sweep() {
	if len(r.records) < r.sweepAt {
		return
	}
	for key := range r.records {
		if _, found := r.live(key); !found {
			delete(r.records, key)
		}
	}
	r.sweepAt = max(firstSweep, 2*len(r.records))
}
