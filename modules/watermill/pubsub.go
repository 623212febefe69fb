package watermillbridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

const (
	// MetadataKey is the metadata with the ordering key: the messages of one key stay in order.
	MetadataKey = "ordering-key"

	// metadataType is Watermill's metadata for a content type.
	metadataType = "Content-Type"

	typeJSON  = "application/json"
	typeBytes = "application/octet-stream"
)

// Publisher is a message.Publisher of Watermill. Its methods may be called from any goroutine, if its
// function may be.
type Publisher struct {
	send func(ctx context.Context, m outbox.Message) error
}

// NewPublisher returns a Publisher that passes each message to send, with the message's own context. send
// returns after the message is stored.
func NewPublisher(send func(ctx context.Context, m outbox.Message) error) *Publisher {
	return &Publisher{send}
}

// Direct returns a function for NewPublisher that sends without an outbox, for example by an outboxredis.Publisher
// or a running outboxamqp.Publisher. It returns with the broker's confirm. A payload of over 1 MiB is
// rejected.
func Direct(to driver.Publisher) func(ctx context.Context, m outbox.Message) error {
	return func(ctx context.Context, m outbox.Message) error {
		prepared, err := outbox.Prepare(ctx, []outbox.Message{m}, 0)
		if err != nil {
			return err
		}
		prepared[0].CreatedAt = time.Now() // a store sets it otherwise
		outcome := make(chan error, 1)
		to.Publish(ctx, prepared[0], func(err error) { outcome <- err })
		return <-outcome
	}
}

// Publish sends the messages one after the other. After a failed one it sends no more.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	if p.send == nil {
		return errors.New("watermillbridge: NewPublisher was given no function")
	}
	for _, m := range messages {
		if err := p.send(m.Context(), outgoing(topic, m)); err != nil {
			return fmt.Errorf("watermillbridge: publish to %s: %w", topic, err)
		}
	}
	return nil
}

// Close does nothing: Publish returns after everything is sent, and send belongs to the caller.
func (p *Publisher) Close() error { return nil }

// outgoing converts a message of Watermill to a message of an outbox, which accepts it whatever texts it contains.
func outgoing(topic string, m *message.Message) outbox.Message {
	metadata := maps.Clone(map[string]string(m.Metadata))
	if metadata == nil {
		metadata = map[string]string{}
	}
	typ, key := metadata[metadataType], metadata[MetadataKey]
	for _, own := range []string{metadataType, MetadataKey, headerUUID, headerType, headerKey, headerEscaped, headerLeftOut} {
		delete(metadata, own)
	}
	out := outbox.Message{Name: topic, Body: m.Payload, ContentType: typ, Key: keyOf(key)}
	if out.Key != key {
		metadata[headerKey] = key
	}
	if typ == "" {
		out.ContentType = typeJSON
	}
	if !fits(out.ContentType, m.Payload) {
		out.ContentType = typeBytes
		if typ != "" {
			metadata[headerType] = typ
		}
	}
	if id, err := ids.Parse(m.UUID); err == nil && id.String() == m.UUID {
		out.ID = id
	} else {
		out.ID = uuid.Must(uuid.NewV7())
		metadata[headerUUID] = m.UUID
	}
	out.Headers = carried(metadata)
	return out
}

var (
	errClosed = errors.New("watermillbridge: the subscriber is closed")
	errNacked = errors.New("watermillbridge: nacked")
	errUnread = errors.New("watermillbridge: nobody took the message from the channel")
)

// Consumer is the part of a consumer that a Subscriber needs. The consumers of inboxamqp and inboxredis have it.
type Consumer interface {
	// Setup creates the queue, or the stream and its group.
	Setup(ctx context.Context) error
	// Run consumes until ctx ends.
	Run(ctx context.Context) error
}

// Subscriber is a message.Subscriber and message.SubscribeInitializer of Watermill. Make it with
// NewSubscriber. Its methods may be called from any goroutine.
type Subscriber struct {
	open    func(topic string, p inbox.Processor) (Consumer, error)
	running sync.WaitGroup

	mu     sync.Mutex
	closed bool
	ends   map[*subscription]context.CancelFunc
	failed error // of Run
}

// NewSubscriber returns a Subscriber. It calls open for each subscription, and again for SubscribeInitialize.
// open returns a new consumer of the topic's queue, for the given processor.
func NewSubscriber(open func(topic string, p inbox.Processor) (Consumer, error)) *Subscriber {
	return &Subscriber{open: open, ends: map[*subscription]context.CancelFunc{}}
}

// SubscribeInitialize creates the topic's queue, so that messages wait there for a subscription.
func (s *Subscriber) SubscribeInitialize(topic string) error {
	c, err := s.consumer(topic, inbox.NewMux())
	if err != nil {
		return err
	}
	return setUp(context.Background(), c, topic)
}

// Subscribe creates the topic's queue if there is none, and returns a channel with its messages. The channel is
// closed after ctx ends or Close is called. Messages that are not read within HandlerTimeout are requeued. Subscribe
// fails on a closed Subscriber.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	out := &subscription{
		child:    func() (context.Context, context.CancelFunc) { return context.WithCancel(ctx) },
		messages: make(chan *message.Message), closing: make(chan struct{}),
	}
	c, err := s.consumer(topic, out)
	if err != nil {
		return nil, err
	}
	if err := setUp(ctx, c, topic); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	run, end := context.WithCancel(ctx)
	context.AfterFunc(run, func() { close(out.closing) })
	s.ends[out] = end
	s.running.Go(func() {
		err := c.Run(run)
		end() // Run may have ended by itself
		out.end()
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.ends, out)
		s.failed = errors.Join(s.failed, err)
	})
	return out.messages, nil
}

// Close ends all subscriptions and waits until their channels are closed. Messages in flight without an answer are
// requeued. It returns the errors of consumers.
func (s *Subscriber) Close() error {
	s.mu.Lock()
	s.closed = true
	for _, end := range s.ends {
		end()
	}
	s.mu.Unlock()
	s.running.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

func (s *Subscriber) consumer(topic string, p inbox.Processor) (Consumer, error) {
	c, err := s.open(topic, p)
	if err != nil {
		return nil, fmt.Errorf("watermillbridge: consumer of %s: %w", topic, err)
	}
	return c, nil
}

func setUp(ctx context.Context, c Consumer, topic string) error {
	if err := c.Setup(ctx); err != nil {
		return fmt.Errorf("watermillbridge: set up %s: %w", topic, err)
	}
	return nil
}

// subscription is the inbox.Processor of one subscription.
type subscription struct {
	child    func() (context.Context, context.CancelFunc) // makes a message's context from the context of Subscribe
	messages chan *message.Message
	closing  chan struct{}
	out      sync.WaitGroup // calls of Process
}

// end closes the channel. No more calls of Process start, but a late one may still run.
func (s *subscription) end() {
	s.out.Wait()
	close(s.messages)
}

// Process implements inbox.Processor.
func (s *subscription) Process(ctx context.Context, msgs []*inbox.Message) []error {
	s.out.Add(1)
	defer s.out.Done()
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = s.one(ctx, m)
	}
	return results
}

// one sends a message to the channel and waits for the answer.
func (s *subscription) one(ctx context.Context, m *inbox.Message) error {
	own, cancel := s.child()
	defer cancel()
	in := incoming(m)
	in.SetContext(own)
	select {
	case <-s.closing:
		return inbox.ErrDraining
	default:
	}
	select {
	case s.messages <- in:
	case <-s.closing:
		return inbox.ErrDraining
	case <-ctx.Done():
		return inbox.Postpone(errUnread, 0)
	}
	select {
	case <-in.Acked():
		return nil
	case <-in.Nacked():
		return inbox.Postpone(errNacked, 0)
	case <-s.closing:
		return answered(in, inbox.ErrDraining)
	case <-ctx.Done():
		return answered(in, fmt.Errorf("watermillbridge: neither acked nor nacked: %w", context.Cause(ctx)))
	}
}

// answered is the result of a message at the end: nil if it was acked, else open.
func answered(m *message.Message, open error) error {
	select {
	case <-m.Acked():
		return nil
	default:
		return open
	}
}

// incoming converts a message of an inbox to a message of Watermill.
func incoming(m *inbox.Message) *message.Message {
	metadata := restored(m.Headers)
	id, named := metadata[headerUUID]
	if !named {
		id = m.ID.String()
	}
	in := message.NewMessage(id, m.Body)
	in.Metadata = metadata
	if typ := cmp.Or(metadata[headerType], m.ContentType); typ != "" {
		in.Metadata[metadataType] = typ
	}
	if key := cmp.Or(metadata[headerKey], m.Key); key != "" {
		in.Metadata[MetadataKey] = key
	}
	for _, own := range []string{headerUUID, headerType, headerKey} {
		delete(in.Metadata, own)
	}
	return in
}
