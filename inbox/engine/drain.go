package engine

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

// reserve is the part of ShutdownTimeout that is left when the handlers' time is over: to settle
// their messages and to end the session.
func reserve(shutdown time.Duration) time.Duration { return min(shutdown/10, 6*time.Second) }

// drain is how a run ends: it begins nothing more, gives back what is not begun, cancels the
// handlers when their time is up, and then leaves them behind.
type drain struct {
	halt    context.CancelFunc      // tells the others that it has begun
	abort   context.CancelCauseFunc // ends the handlers' context
	abandon func()                  // notes that handlers are left behind

	on        bool
	aborted   bool
	abandoned bool
	at        time.Time // of the next of these steps; zero: there is none
	reserve   time.Duration
}

func (d *drain) begin(now time.Time, shutdown time.Duration) {
	d.halt()
	d.on, d.reserve = true, reserve(shutdown)
	d.at = now.Add(shutdown - d.reserve)
}

// pass takes the steps whose time has come.
func (d *drain) pass(now time.Time) {
	if !d.on || d.at.IsZero() || now.Before(d.at) {
		return
	}
	if !d.aborted {
		d.aborted, d.at = true, d.at.Add(d.reserve/2)
		d.abort(inbox.ErrDraining)
		return
	}
	d.abandoned, d.at = true, time.Time{}
	d.abandon()
}
