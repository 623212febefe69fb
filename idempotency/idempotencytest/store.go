// Package idempotencytest has in-memory replacements for the stores of package idempotency, for unit tests and
// demonstrations without servers.
//
// [New] returns an idempotencypgx.Store with records in memory. They are part of the transactions of txretrytest and
// are rolled back with them. [NewStore] returns a gate in memory, in place of Redis.
//
// [Prove] runs your request on a real Postgres, once for each point at which it can be interrupted.
//
// Both stores pass the same conformance suite as the real stores.
package idempotencytest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// The times of a Store.
const (
	lease     = 30 * time.Second
	retention = 48 * time.Hour
)

// Store is a gate in memory, in place of Redis. Its leases last 30 s and its records 48 h, on the clock of package
// time, so that it works in testing/synctest. It is safe for concurrent use.
type Store struct {
	// Lease, if set, returns the real length of a lease whose owner assumes d. It is shorter than d if the gate's
	// clock runs fast or jumps. Set it before the store is used.
	Lease func(ctx context.Context, d time.Duration) time.Duration

	mu      sync.Mutex
	records map[driver.Key]*record
	sweepAt int // number of records at which the expired ones are dropped
}

type record struct {
	token       string
	since       time.Time
	fingerprint driver.Fingerprint
	completed   bool
	response    driver.Response
	expires     time.Time // the end of the lease, or of a completed record
}

// firstSweep is the number of records below which a store is never swept.
const firstSweep = 1024

// NewStore returns an empty store.
func NewStore() *Store {
	return &Store{records: map[driver.Key]*record{}, sweepAt: firstSweep}
}

// Begin implements driver.Store.
func (s *Store) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	if err := errors.Join(ctx.Err(), claim.Key.Validate()); err != nil {
		return driver.BeginResult{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	rec := s.live(claim.Key, now)
	if rec != nil && rec.completed {
		return driver.BeginResult{
			State: driver.Completed, Fingerprint: rec.fingerprint, Response: rec.response.Clone(),
		}, nil
	}
	if rec != nil && rec.token != claim.Token {
		return driver.BeginResult{
			State: driver.InProgress, Fingerprint: rec.fingerprint, Lease: rec.expires.Sub(now),
		}, nil
	}
	s.sweep(now)
	s.records[claim.Key] = &record{
		token: claim.Token, since: now, fingerprint: claim.Fingerprint, expires: now.Add(s.lease(ctx)),
	}
	return driver.BeginResult{State: driver.Acquired, Lease: lease}, nil
}

// Extend implements driver.Store.
func (s *Store) Extend(ctx context.Context, claim driver.Claim) error {
	return s.change(ctx, claim, func(rec *record, now time.Time) { rec.expires = now.Add(s.lease(ctx)) })
}

func (s *Store) lease(ctx context.Context) time.Duration {
	if s.Lease == nil {
		return lease
	}
	return s.Lease(ctx, lease)
}

// Complete implements driver.Store.
func (s *Store) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	err := s.change(ctx, claim, func(rec *record, now time.Time) {
		rec.fingerprint = claim.Fingerprint
		rec.completed, rec.response = true, resp
		rec.expires = now.Add(retention)
	})
	if err != nil && s.completedBy(claim) {
		return nil
	}
	return err
}

func (s *Store) completedBy(claim driver.Claim) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec := s.live(claim.Key, time.Now())
	return rec != nil && rec.completed && rec.token == claim.Token
}

// Release implements driver.Store.
func (s *Store) Release(ctx context.Context, claim driver.Claim) error {
	return s.change(ctx, claim, func(*record, time.Time) { delete(s.records, claim.Key) })
}

// Look implements driver.Looker.
func (s *Store) Look(ctx context.Context, key driver.Key) (driver.Known, error) {
	if err := errors.Join(ctx.Err(), key.Validate()); err != nil {
		return driver.Known{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	rec := s.live(key, now)
	if rec == nil {
		return driver.Known{}, nil
	}
	known := driver.Known{State: driver.InProgress, Since: rec.since, Left: rec.expires.Sub(now), Fingerprint: rec.fingerprint}
	if rec.completed {
		known.State, known.Response = driver.Completed, rec.response.Clone()
	}
	return known, nil
}

// Flush deletes everything, like FLUSHALL of Redis. Claims in use are lost.
func (s *Store) Flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.records)
}

// change applies fn to the record that claim holds.
func (s *Store) change(ctx context.Context, claim driver.Claim, fn func(rec *record, now time.Time)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	rec := s.live(claim.Key, now)
	if rec == nil || rec.completed || rec.token != claim.Token {
		return driver.ErrLeaseLost
	}
	fn(rec, now)
	return nil
}

// live returns the record, or nil if its time is over.
func (s *Store) live(key driver.Key, now time.Time) *record {
	rec := s.records[key]
	if rec == nil || !now.Before(rec.expires) {
		return nil
	}
	return rec
}

// sweep drops expired records each time the store has doubled.
func (s *Store) sweep(now time.Time) {
	if len(s.records) < s.sweepAt {
		return
	}
	for key := range s.records {
		if s.live(key, now) == nil {
			delete(s.records, key)
		}
	}
	s.sweepAt = max(firstSweep, 2*len(s.records))
}

// New returns an idempotencypgx.Store with records in memory, for the transactions of txretrytest. As in Postgres, a
// record is visible after its commit. cfg.Records and cfg.Lease must be zero.
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

// records are a pgxdriver.Records in memory. They are safe for concurrent use.
type records struct {
	retention time.Duration

	mu      sync.Mutex
	records map[driver.Key]kept
	pending map[driver.Key]bool // inserted by a COMMIT that is still running
	sweepAt int                 // number of records at which the expired ones are dropped
}

type kept struct {
	pgxdriver.Record
	expires time.Time
}

func newRecords() *records {
	return &records{retention: retention, records: map[driver.Key]kept{}, pending: map[driver.Key]bool{}, sweepAt: firstSweep}
}

// Insert implements pgxdriver.Records. Like the real one it takes effect with COMMIT, and a second record makes
// COMMIT fail with SQLSTATE 23505.
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

// sweep drops expired records each time their number has doubled.
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

// InFlight returns the number of held claims. It is always exact.
func (s *Store) InFlight(context.Context) (n int, exact bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for _, r := range s.records {
		if !r.completed && now.Before(r.expires) {
			n++
		}
	}
	return n, true, nil
}

// Prove runs a request with an idempotency key on a real database under faults, as txretrytest.Proof describes, and
// compares the answers of each schedule. start works like a process of your program: on the given pool it makes the
// idempotencypgx.Store, and returns one request with the key, such as a call of DoKey, or of your http.Handler with
// an httptest.ResponseRecorder. Each attempt is one request of a client, which retries after an error, after a status
// of 500 or more, and after an answer with a Retry-After. All schedules use one key. With Proof.Effects each schedule
// has its own key, so that another system that deduplicates by key runs again; the key reads <key> in Proof.Rows.
// Give a gate a short lease, because the request after a killed process waits for the end of the lease.
func Prove(t txretrytest.TB, p txretrytest.Proof,
	start func(pool *pgxpool.Pool) (request func(ctx context.Context, key idempotency.Key) (idempotency.Response, error), err error),
) {
	t.Helper()
	var key idempotency.Key
	prove.Run(t, prove.Proof(p), prove.Work{
		Name: "idempotencytest.Prove", Keyed: true,
		Fresh: func() uuid.UUID {
			key = idempotency.NewKey()
			return uuid.MustParse(string(key))
		},
		Start: func(_ context.Context, pool *pgxpool.Pool) (func(ctx context.Context) prove.Outcome, error) {
			request, err := start(pool)
			key := key
			return func(ctx context.Context) prove.Outcome { return answered(request(ctx, key)) }, err
		},
	})
}

// answered returns the outcome of an answer for a client.
func answered(resp idempotency.Response, err error) prove.Outcome {
	text := fmt.Sprintf("%d %s", resp.Status, resp.Body)
	if err == nil && (resp.Status >= http.StatusInternalServerError || resp.Header.Get("Retry-After") != "") {
		err = fmt.Errorf("answer %s", text)
	}
	return prove.Outcome{Answer: text, Err: err}
}
