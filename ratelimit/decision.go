package ratelimit

import "time"

// Decision is the answer of a Limiter.
type Decision struct {
	// Allowed says whether the charges were taken: all or none.
	Allowed bool
	// RetryAfter is how long after At the same charges would be allowed if nobody
	// else charged anything: exact to the millisecond. Zero if Allowed or Never.
	RetryAfter time.Duration
	// Never says that a cost is more than its limit can ever hold.
	Never bool
	// Denied is the name of the limit that decided: the one that takes longest to
	// admit its charge. Empty if Allowed.
	Denied string
	// Delay is how long to wait before acting on a reservation; see Reserver. Zero
	// otherwise.
	Delay time.Duration
	// Limits is the state of each limit after the decision, in the order of the
	// charges.
	Limits []State
	// At is the time of the decision by the store's clock, in milliseconds.
	At time.Time
	// Charges are the charges that were taken, ready for Refund. Nil if denied.
	Charges []Charge
	// Unmetered says that the store could not be asked and the limiter's policy let
	// the request pass.
	Unmetered bool
}

// State is one limit's state after a decision.
type State struct {
	Name   string
	Max    int64
	Window time.Duration
	// Remaining is the number of units that could be charged now.
	Remaining int64
	// Reset is how long until more is available: for a limit that denied, until it
	// admits the charge; else, until the current window ends or the bucket is full.
	Reset time.Duration
}
