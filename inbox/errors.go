package inbox

import (
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/inbox/internal/base"
)

// ErrDraining is the cause (context.Cause) with which a consumer cancels the context of
// handlers that are still at work when its shutdown budget is spent. Whatever error such a
// handler returns, its message is given back uncounted.
var ErrDraining = errors.New("inbox: consumer is draining")

// Unrecoverable marks an error that no retry can mend: the message becomes a dead letter at
// once, of class unrecoverable unless Classed says another. Nil stays nil.
func Unrecoverable(err error) error { return base.Mark(err, base.Verdict{Kind: base.Unrecoverable}) }

// Recoverable marks an error that will pass: the message is retried with growing delays
// however often it has failed, until it is older than the policy's MaxAge. Nil stays nil.
func Recoverable(err error) error { return base.Mark(err, base.Verdict{Kind: base.Recoverable}) }

// RetryAfter is Recoverable with the delay before the next attempt, for example out of a
// Retry-After header. A broker with fixed delays waits at least d. Nil stays nil; d of
// zero or less leaves the delay to the policy, and a shorter one than 100 ms counts as 100 ms, or as
// RetryPolicy.BaseDelay if that is shorter.
func RetryAfter(err error, d time.Duration) error {
	return base.Mark(err, base.Verdict{Kind: base.Recoverable, After: max(d, 0)})
}

// Postpone marks an error that is no failure of the message: it is delivered again after
// about d, as often as it takes, and nothing is counted. Nil stays nil; d of zero or less
// takes the policy's first delay, and a short one is lengthened as by RetryAfter.
func Postpone(err error, d time.Duration) error {
	return base.Mark(err, base.Verdict{Kind: base.Postponed, After: max(d, 0)})
}

// Unavailable marks an error of a server that processing needs, such as the database: the
// message comes again uncounted, and the consumer pauses unless others go through. If they do,
// and the message fails like this once more, the server is there after all and it counts as an
// unmarked failure; where a server is down that only some messages need, use Recoverable.
// Nil stays nil.
func Unavailable(err error) error { return base.Mark(err, base.Verdict{Kind: base.Unavailable}) }

// Classed puts an error into a class, which selects its dead-letter queue; whether it is
// retried first stays as the error inside says. A class is 1 to 64 of a-z, 0-9, dot,
// hyphen and underscore; any other text leaves the class as it is. Nil stays nil.
func Classed(err error, class string) error {
	if !base.ValidClass(class) {
		return err
	}
	return base.Mark(err, base.Verdict{Class: class})
}

// Invalid marks an error of the message itself: a dead letter at once, of class validation.
// Nil stays nil.
func Invalid(err error) error {
	return base.Mark(err, base.Verdict{Kind: base.Unrecoverable, Class: base.ClassValidation})
}
