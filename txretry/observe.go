package txretry

import (
	"context"
	"time"
)

// Hooks are optional callbacks for observation. They run on the goroutine that
// called Do, while no connection is held, and should return quickly.
type Hooks struct {
	// OnRetry runs after a failed attempt that will be followed by another one,
	// before the delay. The turn of a serial key is still the call's then.
	OnRetry func(ctx context.Context, r Retry)

	// OnDone runs once per call of Do whose arguments were valid and that is not
	// nested, before the AfterCommit and AfterRollback functions and when the turn
	// of a serial key has been passed on.
	OnDone func(ctx context.Context, d Done)
}

// Retry describes a failed attempt that will be followed by another one.
type Retry struct {
	Name    string        // Options.Name
	Number  int           // of the failed attempt, from 1
	Attempt Attempt       // what happened
	Delay   time.Duration // until the next attempt
}

// Done describes a finished call of Do.
type Done struct {
	Name     string        // Options.Name
	Outcome  Outcome       // what became of the transaction
	Attempts int           // how many were made, the last one included
	Failed   []Attempt     // those that failed for a transient reason
	Duration time.Duration // of the whole call, delays included
	Phases   Phases        // where the time went
	Err      error         // what Do returns
}

// Phases is the time spent in the parts of a call, over all its attempts.
type Phases struct {
	Queue   time.Duration // waiting for the turn of a serial key
	Acquire time.Duration // waiting for a connection
	Begin   time.Duration
	Fn      time.Duration
	Commit  time.Duration
	Resolve time.Duration // asking what became of a COMMIT
	Sleep   time.Duration // between attempts, their rollbacks included
}

// Outcome is what became of a transaction.
type Outcome string

// The outcomes of a transaction.
const (
	Committed  Outcome = "committed"
	RolledBack Outcome = "rolled_back"
	Unknown    Outcome = "unknown" // COMMIT was sent and not answered
)

func (c *call) done(duration time.Duration, err error) Done {
	return Done{
		Name: c.opts.Name, Outcome: c.outcome, Attempts: c.attempts, Failed: c.failed,
		Duration: duration, Phases: c.phases, Err: err,
	}
}
