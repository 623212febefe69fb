package inboxamqp

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// reserve is the part of ShutdownTimeout that is left when the handlers' time is over: to settle
// their messages and to close the connections.
func reserve(shutdown time.Duration) time.Duration { return min(shutdown/10, 6*time.Second) }

// lifetime is how a run ends, in this order: stop, the end of work, abandoned, overdue. Finished
// ends with the run, early or late.
type lifetime struct {
	shutdown time.Duration

	stop      context.Context // done: take no more messages
	halt      context.CancelFunc
	work      context.Context // of the handlers
	abort     context.CancelCauseFunc
	abandoned chan struct{}   // closed: handlers that still run are left behind
	overdue   chan struct{}   // closed: all time is up
	finished  context.Context // done: nothing may wait any more
	end       context.CancelFunc
}

func newLifetime(ctx context.Context, shutdown time.Duration) *lifetime {
	l := &lifetime{shutdown: shutdown, abandoned: make(chan struct{}), overdue: make(chan struct{})}
	l.stop, l.halt = context.WithCancel(ctx)
	l.work, l.abort = context.WithCancelCause(context.WithoutCancel(ctx))
	l.finished, l.end = context.WithCancel(context.WithoutCancel(ctx))
	return l
}

// keep waits for the stop and then ends the rest when its time is up. It returns when the run has
// finished.
func (l *lifetime) keep() {
	defer l.abort(nil)
	select {
	case <-l.stop.Done():
	case <-l.finished.Done():
		return
	}
	left := reserve(l.shutdown)
	if runloop.Sleep(l.finished, l.shutdown-left) != nil {
		return
	}
	l.abort(inbox.ErrDraining)
	if runloop.Sleep(l.finished, left/2) != nil {
		return
	}
	close(l.abandoned)
	if runloop.Sleep(l.finished, left/2) == nil {
		close(l.overdue)
	}
}
