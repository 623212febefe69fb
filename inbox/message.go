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
