package idempotencytest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
)

// The times of a Store.
const (
	Lease     = 30 * time.Second
	Retention = 48 * time.Hour
)

// Store is an idempotency.Store in memory, with the times of the real ones
// (Lease, Retention) on the clock of package time, so that testing/synctest
// can move it. It is safe for concurrent use.
type Store struct {
	mu      sync.Mutex
	records map[idempotency.Key]*record
	sweepAt int // number of records at which the expired ones are dropped
}

type record struct {
	token       string
	fingerprint idempotency.Fingerprint
	completed   bool
	response    idempotency.Response
	expires     time.Time // of the lease; of the record once completed
}

// firstSweep keeps small stores from being swept at all.
const firstSweep = 1024

// NewStore returns an empty store.
func NewStore() *Store {
	return &Store{records: map[idempotency.Key]*record{}, sweepAt: firstSweep}
}

// Begin implements idempotency.Store.
func (s *Store) Begin(ctx context.Context, claim idempotency.Claim) (idempotency.Outcome, error) {
	if err := errors.Join(ctx.Err(), claim.Key.Validate()); err != nil {
		return idempotency.Outcome{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	rec := s.live(claim.Key, now)
	if rec != nil && rec.completed {
		return idempotency.Outcome{
			State: idempotency.Completed, Fingerprint: rec.fingerprint, Response: rec.response.Clone(),
		}, nil
	}
	if rec != nil && rec.token != claim.Token {
		return idempotency.Outcome{
			State: idempotency.InProgress, Fingerprint: rec.fingerprint, Lease: rec.expires.Sub(now),
		}, nil
	}
	s.sweep(now)
	s.records[claim.Key] = &record{
		token: claim.Token, fingerprint: claim.Fingerprint, expires: now.Add(Lease),
	}
	return idempotency.Outcome{State: idempotency.Acquired, Lease: Lease}, nil
}

// Extend implements idempotency.Store.
func (s *Store) Extend(ctx context.Context, claim idempotency.Claim) error {
	return s.change(ctx, claim, func(rec *record, now time.Time) { rec.expires = now.Add(Lease) })
}

// Complete implements idempotency.Store.
func (s *Store) Complete(ctx context.Context, claim idempotency.Claim, resp idempotency.Response) error {
	err := s.change(ctx, claim, func(rec *record, now time.Time) {
		rec.fingerprint = claim.Fingerprint
		rec.completed, rec.response = true, resp
		rec.expires = now.Add(Retention)
	})
	if err != nil && s.completedBy(claim) {
		return nil
	}
	return err
}

func (s *Store) completedBy(claim idempotency.Claim) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec := s.live(claim.Key, time.Now())
	return rec != nil && rec.completed && rec.token == claim.Token
}

// Release implements idempotency.Store.
func (s *Store) Release(ctx context.Context, claim idempotency.Claim) error {
	return s.change(ctx, claim, func(*record, time.Time) { delete(s.records, claim.Key) })
}

// change applies fn to the record that claim holds.
func (s *Store) change(ctx context.Context, claim idempotency.Claim, fn func(rec *record, now time.Time)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	rec := s.live(claim.Key, now)
	if rec == nil || rec.completed || rec.token != claim.Token {
		return idempotency.ErrLeaseLost
	}
	fn(rec, now)
	return nil
}

// live returns the record unless its time is over.
func (s *Store) live(key idempotency.Key, now time.Time) *record {
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
