package idempotencypgx

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
)

// Fallback returns what may stand in for the gate while that cannot be asked:
// set it as idempotency.MiddlewareConfig.Fallback. The records alone decide. A
// key that has one is answered from it; without one every request may try, and
// of those at the same time only one transaction commits, whose answer all of
// them get. So it protects what handlers do in the transaction of Run, and
// nothing else they do.
func (r *Runner) Fallback() idempotency.Store { return &fallback{r} }

type fallback struct{ runner *Runner }

// Begin grants the claim without a lease: the primary key of the records is the
// only lock there is.
func (f *fallback) Begin(ctx context.Context, claim idempotency.Claim) (idempotency.Outcome, error) {
	if err := claim.Key.Validate(); err != nil {
		return idempotency.Outcome{}, err
	}
	rec, found, err := f.runner.records.Lookup(ctx, claim.Key)
	switch {
	case err != nil:
		return idempotency.Outcome{}, err
	case found:
		return rec.outcome(), nil
	}
	return idempotency.Outcome{State: idempotency.Acquired}, nil
}

func (f *fallback) Extend(context.Context, idempotency.Claim) error { return nil }

// Complete stores what was answered without Run, such as a refusal.
func (f *fallback) Complete(ctx context.Context, claim idempotency.Claim, resp idempotency.Response) error {
	rec := Record{Key: claim.Key, Token: claim.Token, Fingerprint: claim.Fingerprint, Response: resp}
	failure := f.runner.tx.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		return f.runner.records.Insert(ctx, tx, rec)
	})
	if failure == nil {
		return nil
	}
	stored, found, err := f.runner.records.Resolve(ctx, claim.Key)
	switch {
	case err != nil || !found:
		return failure
	case stored.Token != claim.Token:
		return fmt.Errorf("idempotencypgx: complete: %w", idempotency.ErrLeaseLost)
	}
	return nil
}

func (f *fallback) Release(context.Context, idempotency.Claim) error { return nil }
