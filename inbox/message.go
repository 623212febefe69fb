package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// Message is one message as it arrived. Handlers must not change it.
type Message struct {
	// ID is the sender's id, a UUID v7 and the same on every delivery. Adapters leave it
	// zero when none came or it could not be read as a UUID; such a message is refused.
	ID uuid.UUID
	// Name is the semantic name that selects the handler, such as order.placed.
	Name string
	// Body is the payload as received.
	Body []byte
	// ContentType is the media type of Body; empty counts as JSON.
	ContentType string
	// ContentEncoding is how Body is packed, such as gzip, which Handle unpacks; empty on Redis, and if the sender
	// gave none.
	ContentEncoding string
	// CorrelationID and ReplyTo are the AMQP properties of these names as the sender set them: what the message answers,
	// and the queue that wants an answer. Empty on Redis, and if the sender set none.
	CorrelationID, ReplyTo string
	// Key is the sender's ordering key; empty when none came. See ConsumerConfig.Ordered.
	Key string
	// Headers are the transport's headers that have a sensible text; nil when there are none.
	Headers map[string]string
	// Attempt is 1 at the first delivery and grows by one with every counted failure.
	// Deliveries given back uncounted do not change it. Less than 1 counts as 1.
	Attempt int
	// Recovered is how many of the failures that Attempt counts were recoverable: those use
	// up none of RetryPolicy.MaxAttempts.
	Recovered int
	// Replays is how often the message was returned from the dead letters; each time Attempt
	// begins at 1 again.
	Replays int
	// Redelivered says that the broker has handed out this very copy before.
	Redelivered bool
	// Queue is where the message came from, and where a retry returns it to.
	Queue string
	// PublishedAt is the sender's time stamp, else the time in ID; zero when there is neither.
	PublishedAt time.Time
	// FirstFailedAt is the time of the first counted failure; zero when there was none.
	FirstFailedAt time.Time
	// History are the counted failures so far, oldest first, as far as the transport kept them: at
	// most the first five and the last five.
	History []FailedAttempt
}

// FailedAttempt is one counted failure of a message.
type FailedAttempt struct {
	// At is the time of the consumer's clock.
	At time.Time
	// Error is the beginning of the error's text.
	Error string
	// Consumer names the consumer that tried it.
	Consumer string
}

// Validate returns an error of class validation, all violations in one, when the
// message cannot be given to any handler: its id is no UUID v7, or its name is empty,
// longer than 255 bytes, not UTF-8 or has a NUL in it.
func (m *Message) Validate() error {
	var problems []error
	switch m.ID {
	case uuid.Nil:
		problems = append(problems, errors.New("message id is missing or is no UUID"))
	default:
		if err := ids.Check(m.ID); err != nil {
			problems = append(problems, fmt.Errorf("message id: %w", err))
		}
	}
	switch {
	case m.Name == "":
		problems = append(problems, errors.New("message name is missing"))
	case len(m.Name) > base.MaxNameBytes:
		problems = append(problems, fmt.Errorf("message name has %d bytes, more than %d", len(m.Name), base.MaxNameBytes))
	case !base.IsText(m.Name):
		problems = append(problems, errors.New("message name is no text"))
	}
	if len(problems) == 0 {
		return nil
	}
	return Invalid(fmt.Errorf("inbox: %w", errors.Join(problems...)))
}

// FromContext returns the message that the handler of this context is working on.
func FromContext(ctx context.Context) (*Message, bool) {
	m, ok := base.FromContext(ctx).(*Message)
	return m, ok
}

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

// Stats counts the messages of a consumer, those of all its processes together.
type Stats struct {
	// Waiting messages are in the queue or stream, and no consumer has them. Where Redis cannot tell
	// what a group has not read, which is so after XDEL, all entries of the stream count.
	Waiting int
	// Retrying messages have failed and wait for their next attempt at a place of their own. On RabbitMQ a process
	// that dies may leave up to Config.Prefetch too many, for an hour.
	Retrying int
	// PutOff messages wait at a place of their own and have not failed: a limit or a Postpone has sent them there.
	// They are counted as Retrying is.
	PutOff int
	// Dead counts the dead letters by the class of their queue, also of other consumers that share it. Those of a
	// class without a queue of its own, see ConsumerConfig.Classes, are counted as default.
	Dead map[string]int
	// Held says that a session may have further dead letters in hand, which Dead leaves out, such as a
	// replay that is paced. Of RabbitMQ only; see ErrHeld.
	Held bool
}
