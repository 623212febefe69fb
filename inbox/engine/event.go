package engine

import "github.com/holdfast-go/holdfast/inbox/driver"

// event is what the loop is told. Only the fields of its kind are set.
type event struct {
	kind       kind
	session    *session     // begun, started, stopped, arrived, ended
	serial     int          // started, stopped: of the wish
	items      []item       // arrived
	job        *job         // finished
	settlement *settlement  // settled
	removal    *removal     // moved
	err        error        // ended: why; nil where that was wished
	limit      string       // halted: by which limit; empty: by the caller
	by         driver.Pause // switched: an operator's pause; zero: none
}

type kind uint8

const (
	begun    kind = iota + 1 // a session
	started                  // it receives messages
	stopped                  // it receives none; there may be no session
	arrived                  // messages
	ended                    // a session, or the attempt at one
	left                     // the receiver, for good
	finished                 // a job
	settled                  // acknowledgements
	moved                    // messages
	halted                   // the run is to end
	switched                 // by an operator
)
