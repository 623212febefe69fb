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
	// ID is the sender's id, a UUID v7 and the same on every delivery. It is zero if the message had no id,
	// or none that is a UUID; such a message is rejected.
	ID uuid.UUID
	// Name selects the handler, such as order.placed.
	Name string
	// Body is the payload as received.
	Body []byte
	// ContentType is the media type of Body; empty means JSON.
	ContentType string
	// ContentEncoding is how Body is packed, such as gzip, which Handle unpacks. Empty if the sender set none.
	ContentEncoding string
	// CorrelationID and ReplyTo are the AMQP properties or Redis fields of these names, as the sender set them:
	// the id of a request, and the queue for the reply. Empty if the sender set none.
	CorrelationID, ReplyTo string
	// Key is the sender's ordering key; empty if the sender set none. See ConsumerConfig.Ordered.
	Key string
	// Headers are the transport's headers that have a text form; nil if there are none.
	Headers map[string]string
	// Attempt is 1 at the first delivery and grows by one with every counted failure. Uncounted redeliveries
	// do not change it. Less than 1 counts as 1.
	Attempt int
	// Recovered is how many of the counted failures were recoverable. Those do not use up
	// RetryPolicy.MaxAttempts.
	Recovered int
	// Replays is how often the message was returned from the dead letters. Each replay resets Attempt to 1.
	Replays int
	// Redelivered is true if the broker has delivered this copy before.
	Redelivered bool
	// Queue is the queue or stream that the message came from, and that a retry returns it to.
	Queue string
	// PublishedAt is the sender's time stamp, else the time in ID; zero if there is neither.
	PublishedAt time.Time
	// FirstFailedAt is the time of the first counted failure; zero if there was none.
	FirstFailedAt time.Time
	// History has the counted failures, oldest first. A transport keeps at most the first five and the last
	// five.
	History []FailedAttempt
}

// FailedAttempt is one counted failure of a message.
type FailedAttempt struct {
	// At is the time of the failure by the consumer's clock.
	At time.Time
	// Error is the beginning of the error text.
	Error string
	// Consumer is the name of the consumer that tried the message.
	Consumer string
}

// Validate returns an error of class validation, with all violations joined, if no handler can get the
// message: its id is not a UUID v7, or its name is empty, longer than 255 bytes, not UTF-8 or contains a NUL.
func (m *Message) Validate() error {
	var problems []error
	switch m.ID {
	case uuid.Nil:
		problems = append(problems, errors.New("message id is missing or not a UUID"))
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
		problems = append(problems, errors.New("message name is not UTF-8 or contains a NUL"))
	}
	if len(problems) == 0 {
		return nil
	}
	return Invalid(fmt.Errorf("inbox: %w", errors.Join(problems...)))
}

// FromContext returns the message of a handler's context.
func FromContext(ctx context.Context) (*Message, bool) {
	m, ok := base.FromContext(ctx).(*Message)
	return m, ok
}

// ErrDraining is the cause (context.Cause) with which a consumer cancels the context of handlers that still
// run near the end of ShutdownTimeout. If such a handler returns an error, its message is requeued and not
// counted.
var ErrDraining = errors.New("inbox: consumer is draining")

// Unrecoverable marks an error that a retry cannot fix. The message becomes a dead letter at once, of class
// unrecoverable unless Classed sets another class. Nil stays nil.
func Unrecoverable(err error) error { return base.Mark(err, base.Verdict{Kind: base.Unrecoverable}) }

// Recoverable marks an error that will pass. The message is retried with growing delays, however often it has
// failed, until it is older than the policy's MaxAge. Nil stays nil.
func Recoverable(err error) error { return base.Mark(err, base.Verdict{Kind: base.Recoverable}) }

// RetryAfter is Recoverable with a delay before the next attempt, such as the value of a Retry-After header.
// A broker with fixed delays waits at least d. If d is zero or less, the policy chooses the delay. The
// shortest delay is 100 ms, or RetryPolicy.BaseDelay if that is shorter. Nil stays nil.
func RetryAfter(err error, d time.Duration) error {
	return base.Mark(err, base.Verdict{Kind: base.Recoverable, After: max(d, 0)})
}

// Postpone marks an error that is not the message's failure. The message is delivered again after about d,
// without limit, and nothing is counted. If d is zero or less, the delay is the policy's first one. The
// shortest delay is the same as for RetryAfter. Nil stays nil.
func Postpone(err error, d time.Duration) error {
	return base.Mark(err, base.Verdict{Kind: base.Postponed, After: max(d, 0)})
}

// Unavailable marks an error of a server that the handler needs, such as the database. The message is
// redelivered uncounted, and the consumer pauses unless other messages succeed. If they do and this message
// fails in the same way again, the server is evidently reachable, and the failure counts as an unmarked one.
// For a server that only some messages need, use Recoverable. Nil stays nil.
func Unavailable(err error) error { return base.Mark(err, base.Verdict{Kind: base.Unavailable}) }

// Classed sets the class of an error, which selects its dead-letter queue. The mark of err still decides
// whether the message is retried first. A class is 1 to 64 of a-z, 0-9, dot, hyphen and underscore; any other
// text leaves the class unchanged. Nil stays nil.
func Classed(err error, class string) error {
	if !base.ValidClass(class) {
		return err
	}
	return base.Mark(err, base.Verdict{Class: class})
}

// Invalid marks an error of the message itself: it becomes a dead letter at once, of class validation. Nil
// stays nil.
func Invalid(err error) error {
	return base.Mark(err, base.Verdict{Kind: base.Unrecoverable, Class: base.ClassValidation})
}

// Stats counts the messages of a consumer in all its processes.
type Stats struct {
	// Waiting messages are in the queue or stream and delivered to no consumer. If Redis cannot count the
	// unread entries of a group, as after XDEL, all entries of the stream count.
	Waiting int
	// Retrying messages have failed and wait for their next attempt in a queue of their own. On RabbitMQ a
	// process that dies may leave up to ConsumerConfig.Prefetch too many, for an hour.
	Retrying int
	// PutOff messages wait in a queue of their own and have not failed: a limit or a Postpone delayed them.
	// They are counted like Retrying, with the same possible excess.
	PutOff int
	// Dead counts the dead letters by the class of their queue, including those of other consumers that share
	// the queue. A class without a queue of its own is counted as default; see ConsumerConfig.Classes.
	Dead map[string]int
	// Held is true if another session may have dead letters in flight that Dead does not count, such as those
	// of a paced replay. Only RabbitMQ sets it; see ErrHeld.
	Held bool
}
