package ratelimitredis_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// bubbled is a Memory in a synctest bubble, asked from outside, where calls of a server take real
// time: so its clock moves only when it is told to. It starts at ratelimitredis.Start.
type bubbled struct {
	calls  chan func()
	memory *ratelimit.Memory
}

// inBubble runs body outside of a bubble, with a Memory inside.
func inBubble(t *testing.T, body func(m *bubbled)) {
	t.Helper()
	m := &bubbled{calls: make(chan func())}
	over := make(chan struct{})
	go func() {
		defer close(over)
		defer close(m.calls)
		body(m)
	}()
	synctest.Test(t, func(t *testing.T) {
		var err error
		if m.memory, err = ratelimit.NewMemory(ratelimit.MemoryConfig{}); err != nil {
			t.Error(err)
		}
		for call := range m.calls {
			call()
		}
	})
	<-over
}

// do has f run in the bubble.
func (m *bubbled) do(f func()) {
	done := make(chan struct{})
	m.calls <- func() {
		f()
		close(done)
	}
	<-done
}

// now returns the bubble's time.
func (m *bubbled) now() (now time.Time) {
	m.do(func() { now = time.Now() })
	return now
}

func (m *bubbled) advance(d time.Duration) { m.do(func() { time.Sleep(d) }) }

func (m *bubbled) Allow(ctx context.Context, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	m.do(func() { d, err = m.memory.Allow(ctx, charges...) })
	return d, err
}

func (m *bubbled) Reserve(ctx context.Context, within time.Duration, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	m.do(func() { d, err = m.memory.Reserve(ctx, within, charges...) })
	return d, err
}

func (m *bubbled) Peek(ctx context.Context, charges ...ratelimit.Charge) (d ratelimit.Decision, err error) {
	m.do(func() { d, err = m.memory.Peek(ctx, charges...) })
	return d, err
}

func (m *bubbled) Refund(ctx context.Context, charges ...ratelimit.Charge) (err error) {
	m.do(func() { err = m.memory.Refund(ctx, charges...) })
	return err
}

func (m *bubbled) Reset(ctx context.Context, charges ...ratelimit.Charge) (err error) {
	m.do(func() { err = m.memory.Reset(ctx, charges...) })
	return err
}
