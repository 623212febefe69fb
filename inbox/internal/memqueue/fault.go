package memqueue

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

// Step is a step of the transport's contract at which a fault may happen.
type Step int

// The steps. Receive, Ack, GiveBack, Move and Scan are asked about each message, the others
// without one.
const (
	Open Step = iota + 1
	Start
	Receive
	Ack
	GiveBack
	Move
	Stop
	Close
	Scan
)

// Outcome is what becomes of a step. An error of a session's call, other than ErrStale, ends the
// session: what is unsettled comes again, redelivered.
type Outcome int

// The outcomes.
const (
	// OK works.
	OK Outcome = iota
	// FailBefore fails, and nothing has happened. A failed Move is ErrUnavailable.
	FailBefore
	// FailAfter fails although it took effect: the reply was lost.
	FailAfter
	// Hang is FailBefore after the limit of time that a call has.
	Hang
	// EndSession works, and the session is lost right after it. It concerns the session's calls.
	EndSession
	// Lose says that it worked, and it has not: the message comes again, redelivered. It concerns
	// Receive, which then does not return the message, and Ack.
	Lose
	// Refuse is ErrRefused, of a Move to anywhere but the tail.
	Refuse
)

// Fault says what becomes of a step. It is called from many goroutines and must not block; m is
// nil where the step concerns no message.
type Fault func(at Step, m *inbox.Message) Outcome

var (
	errFault = errors.New("a scripted fault")
	errHang  = errors.New("no answer in time")
)

// at asks the script about a step, and waits where that says Hang.
func (s *Source) at(ctx context.Context, step Step, m *inbox.Message) (Outcome, error) {
	if s.options.Fault == nil {
		return OK, nil
	}
	switch what := s.options.Fault(step, m); what {
	case FailBefore, FailAfter:
		return what, errFault
	case Hang:
		timer := time.NewTimer(s.options.CallTimeout)
		defer timer.Stop()
		select {
		case <-timer.C:
			return FailBefore, errHang
		case <-ctx.Done():
			return FailBefore, ctx.Err()
		}
	default:
		return what, nil
	}
}
