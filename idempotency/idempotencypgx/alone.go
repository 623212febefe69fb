package idempotencypgx

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
)

// alone is a driver.Store in which the records alone decide.
type alone struct{ s *Store }

// Begin grants the claim without a lease: a record, or its absence, is all there is.
func (a alone) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	if err := claim.Key.Validate(); err != nil {
		return driver.BeginResult{}, err
	}
	rec, found, err := a.s.records.Lookup(ctx, claim.Key)
	switch {
	case err != nil:
		return driver.BeginResult{}, err
	case found:
		return completed(rec), nil
	}
	return driver.BeginResult{State: driver.Acquired}, nil
}

// claimingAtBegin is alone for work that goes straight into a transaction, which asks for the key
// when it begins.
type claimingAtBegin struct{ alone }

// claimingAtBegin returns the store to ask for such work.
func (s *Store) claimingAtBegin() driver.Store {
	if s.claimsAtBegin {
		return claimingAtBegin{alone{s}}
	}
	return s
}

// Begin asks nothing, unless a replay is expected. That is one SELECT then, where a
// transaction that finds a record has to be rolled back, too.
func (p claimingAtBegin) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	if !p.s.expected.isReplay() {
		return driver.BeginResult{State: driver.Acquired}, nil
	}
	out, err := p.alone.Begin(ctx, claim)
	p.s.expected.set(out.State == driver.Completed)
	return out, err
}

func (a alone) Extend(context.Context, driver.Claim) error { return nil }

// Complete stores what was answered without Do, such as a refusal. Nothing holds the key meanwhile: the record
// of a run that was faster is the answer.
func (a alone) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	rec := pgxdriver.Record{Key: claim.Key, Token: claim.Token, Fingerprint: claim.Fingerprint, Response: resp}
	failure := a.s.tx.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return a.s.records.Insert(ctx, tx, rec)
	})
	if failure == nil {
		a.s.written()
		return nil
	}
	stored, found, err := a.s.records.Resolve(ctx, claim.Key)
	switch {
	case err != nil || !found:
		return failure
	case stored.Token != claim.Token:
		settle(claim, stored)
		return fmt.Errorf("idempotencypgx: complete: %w", driver.ErrLeaseLost)
	}
	return nil
}

func (a alone) Release(context.Context, driver.Claim) error { return nil }
