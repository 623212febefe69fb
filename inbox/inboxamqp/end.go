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

// serve runs the sessions and ends the run after them. It returns ShutdownTimeout after the stop at
// the latest, whatever hangs.
func (r *run) serve(sessions func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		sessions()
		r.finish()
	}()
	select {
	case <-ended:
	case <-r.overdue:
		r.end()
		r.c.cfg.Logger.Error("ShutdownTimeout is over: what hangs is left behind")
	}
}

// budget ends the handlers' contexts some time after the stop, gives them up a little later, and at
// last the whole run.
func (r *run) budget(abort context.CancelCauseFunc) {
	defer abort(nil)
	select {
	case <-r.stop.Done():
	case <-r.finished.Done():
		return
	}
	all := r.c.cfg.ShutdownTimeout
	left := reserve(all)
	if runloop.Sleep(r.finished, all-left) != nil {
		return
	}
	abort(inbox.ErrDraining)
	if runloop.Sleep(r.finished, left/2) != nil {
		return
	}
	close(r.abandoned)
	if runloop.Sleep(r.finished, left/2) == nil {
		close(r.overdue)
	}
}

// finish waits for the workers and ends the rest.
func (r *run) finish() {
	r.halt()
	close(r.jobs)
	idle := make(chan struct{})
	go func() {
		r.workers.Wait()
		close(idle)
	}()
	select {
	case <-idle:
	case <-r.abandoned:
		r.c.cfg.Logger.Error("handlers ignore the end of their context and are left behind")
		r.spare()
	}
	r.aside.close()
	r.end()
	r.others.Wait()
}
