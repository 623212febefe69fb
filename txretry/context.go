package txretry

import (
	"context"
	"time"
)

// running is the context key under which fn's context carries its transaction.
// Managers on one source share it.
type running struct{ source any }

// fnContext is the context that fn gets. It leads a nested Do to the running
// transaction.
type fnContext struct {
	context.Context
	t      *transaction
	marker any // a running
}

func (c *fnContext) Value(key any) any {
	if key == c.marker {
		return c.t
	}
	return c.Context.Value(key)
}

// detached is a view of fn's context that does not end: COMMIT is not
// interrupted, but a tracer finds its values.
type detached fnContext

func (*detached) Deadline() (deadline time.Time, ok bool) { return time.Time{}, false }
func (*detached) Done() <-chan struct{}                   { return nil }
func (*detached) Err() error                              { return nil }
