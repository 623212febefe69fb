package idempotency

import (
	"context"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/internal/inctx"
)

// lazyContext is a context with a cancellation of its own, behind which a
// context of the standard library stands only once somebody waits for it. It
// lives inside the run that needs it: three contexts made in advance are a dozen
// allocations, more than all else that a run costs.
type lazyContext struct {
	parent   context.Context
	detached bool      // of the parent's cancellation; only its values count
	deadline time.Time // zero: that of the parent, unless detached
	holder   *run      // whom driver.ClaimFrom finds; nil: whom it finds in the parent, and no cause is remembered beside a deadline

	mu     sync.Mutex
	inner  context.Context // nil until somebody waits
	cancel context.CancelCauseFunc
	ended  bool
}

func (c *lazyContext) Deadline() (time.Time, bool) {
	if inner := c.opened(); inner != nil {
		return inner.Deadline()
	}
	if c.detached {
		return c.deadline, !c.deadline.IsZero()
	}
	d, ok := c.parent.Deadline()
	if !c.deadline.IsZero() && (!ok || c.deadline.Before(d)) {
		return c.deadline, true
	}
	return d, ok
}

func (c *lazyContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open()
	return c.inner.Done()
}

func (c *lazyContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.inner != nil:
		return c.inner.Err()
	case c.ended:
		return context.Canceled
	case !c.detached && c.parent.Err() != nil:
		return c.parent.Err()
	case !c.deadline.IsZero() && !time.Now().Before(c.deadline):
		return context.DeadlineExceeded
	}
	return nil
}

func (c *lazyContext) Value(key any) any {
	if c.holder != nil && key == (inctx.Holder{}) {
		return c.holder
	}
	if inner := c.opened(); inner != nil {
		return inner.Value(key)
	}
	if c.detached {
		return context.WithoutCancel(c.parent).Value(key)
	}
	return c.parent.Value(key)
}

// end cancels the context. Only the first cause counts; nil is that of a normal
// end.
func (c *lazyContext) end(cause error) {
	c.mu.Lock()
	if cause != nil {
		c.open() // it has to be remembered
	}
	c.ended = true
	cancel := c.cancel
	c.mu.Unlock()
	if cancel != nil {
		cancel(cause)
	}
}

func (c *lazyContext) opened() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inner
}

func (c *lazyContext) open() {
	if c.inner != nil {
		return
	}
	parent := c.parent
	if c.detached {
		parent = context.WithoutCancel(parent)
	}
	switch {
	case c.deadline.IsZero():
		c.inner, c.cancel = context.WithCancelCause(parent)
	case c.holder == nil:
		ctx, stop := context.WithDeadline(parent, c.deadline)
		c.inner, c.cancel = ctx, func(error) { stop() }
	default:
		timed, stop := context.WithDeadline(parent, c.deadline)
		ctx, cancel := context.WithCancelCause(timed)
		c.inner, c.cancel = ctx, func(cause error) { cancel(cause); stop() }
	}
	if c.ended {
		c.cancel(nil)
	}
}
