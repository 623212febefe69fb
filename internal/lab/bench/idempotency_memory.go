package main

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// recent is a store in memory that drops what is old, as one does whose records
// end as fast as others begin. Without that a run would measure the growth of
// the heap. It forgets too soon for replays.
type recent struct {
	driver.Store // nil: nobody extends or releases here
	generation   atomic.Pointer[generation]
	begun        atomic.Int64
}

// generation is a store and the one before, where some claims are still held.
type generation struct{ young, old *idempotencytest.Store }

const perGeneration = 10_000

func newRecent() *recent {
	s := &recent{}
	s.generation.Store(&generation{young: idempotencytest.NewStore(), old: idempotencytest.NewStore()})
	return s
}

func (s *recent) Begin(ctx context.Context, claim driver.Claim) (driver.BeginResult, error) {
	g := s.generation.Load()
	out, err := g.young.Begin(ctx, claim)
	if out.State == driver.Acquired && s.begun.Add(1)%perGeneration == 0 {
		s.generation.Store(&generation{young: idempotencytest.NewStore(), old: g.young})
	}
	return out, err
}

func (s *recent) Complete(ctx context.Context, claim driver.Claim, resp driver.Response) error {
	g := s.generation.Load()
	err := g.young.Complete(ctx, claim, resp)
	if errors.Is(err, idempotency.ErrLeaseLost) {
		err = g.old.Complete(ctx, claim, resp)
	}
	return err
}
