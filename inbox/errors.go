package inbox

import (
	"fmt"
	"time"
)

// kind is what a marker says about an error.
type kind int

const (
	kindNone kind = iota // default policy
	kindUnrecoverable
	kindRecoverable
	kindPostponed
	kindUnavailable
)

// markedError adds a verdict to an error without changing its text.
type markedError struct {
	err   error
	kind  kind
	class string        // "" = as the error inside says
	after time.Duration // 0 = as the policy says
}

func (e *markedError) Error() string { return e.err.Error() }
func (e *markedError) Unwrap() error { return e.err }

// Is makes errors.Is(err, ErrUnavailable) true.
func (e *markedError) Is(target error) bool {
	return target == ErrUnavailable && e.kind == kindUnavailable
}

func mark(err error, m markedError) error {
	if err == nil {
		return nil
	}
	m.err = err
	return &m
}

// Unrecoverable marks an error that no retry can mend: the message goes to a dead-letter
// queue at once, of class ClassUnrecoverable unless Classed says another. Nil stays nil.
func Unrecoverable(err error) error { return mark(err, markedError{kind: kindUnrecoverable}) }

// Recoverable marks an error that will pass: the message is retried with growing delays
// however often it has failed, until it is older than the policy's MaxAge. Nil stays nil.
func Recoverable(err error) error { return mark(err, markedError{kind: kindRecoverable}) }

// RetryAfter is Recoverable with the delay before the next attempt, for example out of a
// Retry-After header. A broker with fixed delays waits at least d. Nil stays nil; d of
// zero or less leaves the delay to the policy.
func RetryAfter(err error, d time.Duration) error {
	return mark(err, markedError{kind: kindRecoverable, after: max(d, 0)})
}

// Postpone marks an error that is no failure of the message: it is delivered again after
// about d, as often as it takes, and nothing is counted. Nil stays nil; d of zero or less
// takes the policy's first delay.
func Postpone(err error, d time.Duration) error {
	return mark(err, markedError{kind: kindPostponed, after: max(d, 0)})
}

// Unavailable marks an error of a server that processing needs, such as the database: the
// message comes again uncounted, and the consumer pauses unless others go through. If they do,
// and the message fails like this once more, the server is there after all and it counts as an
// unmarked failure; where a server is down that only some messages need, use Recoverable.
// errors.Is(err, ErrUnavailable) is true for it. Nil stays nil.
func Unavailable(err error) error { return mark(err, markedError{kind: kindUnavailable}) }

// Classed puts an error into a class, which selects its dead-letter queue; whether it is
// retried first stays as the error inside says. A class is 1 to 64 of a-z, 0-9, dot,
// hyphen and underscore; any other text leaves the class as it is. Nil stays nil.
func Classed(err error, class string) error {
	if !ValidClass(class) {
		return err
	}
	return mark(err, markedError{class: class})
}

// Invalid marks an error of the message itself: dead at once, of class ClassValidation.
// Nil stays nil.
func Invalid(err error) error {
	return mark(err, markedError{kind: kindUnrecoverable, class: ClassValidation})
}

// PanicError is the result of a message whose handler panicked. It is of class
// ClassDefault unless the value is an error that says otherwise.
type PanicError struct {
	Value any
	Stack []byte // for the log; not in Error's text
}

// Error implements error.
func (e *PanicError) Error() string { return fmt.Sprintf("inbox: handler panicked: %v", e.Value) }

// Unwrap returns the panic's value when that is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
