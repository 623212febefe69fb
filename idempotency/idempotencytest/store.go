package idempotencytest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/driver"
)

// The times of a Store.
const (
	lease     = 30 * time.Second
	retention = 48 * time.Hour
)

// Store is a gate in memory, as Redis is in production: its leases last 30 s and its
// records 48 h, on the clock of package time, so that testing/synctest can move it. It
// is safe for concurrent use.
type Store struct {
	// Lease, where it is set, returns how long a lease lasts whose owner counts on d: less where the
	// clock of the gate runs fast or jumps. Set it before the store is used.
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
	expires     time.Time // of the lease; of the record once completed
}

// firstSweep keeps small stores from being swept at all.
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

// Flush forgets everything, as a Redis does that is flushed: claims in use are lost.
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

// live returns the record unless its time is over.
func (s *Store) live(key driver.Key, now time.Time) *record {
	rec := s.records[key]
	if rec == nil || !now.Before(rec.expires) {
		return nil
	}
	return rec
}

// sweep drops expired records whenever the store has doubled.
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
