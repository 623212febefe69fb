package watermillbridge_test

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxredis"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	watermillbridge "github.com/holdfast-go/holdfast/modules/watermill"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// short shortens Watermill's suite in tiers 1 and 2. At night it sends more messages and tests subscribers that
// close repeatedly.
var short = os.Getenv(testenv.NightlyVar) != "1"

// oneByOne is the config of a subscription's consumer: Watermill expects the next message after an answer.
var oneByOne = inbox.ConsumerConfig{
	Concurrency: 1, Logger: slog.New(slog.DiscardHandler), ShutdownTimeout: testenv.Patience,
	Retry: inbox.RetryPolicy{BaseDelay: 50 * time.Millisecond},
}

// bridge returns both sides. The suite leaves some subscribers open.
func bridge(t *testing.T, to driver.Publisher, open func(string, inbox.Processor) (watermillbridge.Consumer, error)) (message.Publisher, message.Subscriber) {
	t.Helper()
	s := watermillbridge.NewSubscriber(open)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return watermillbridge.NewPublisher(watermillbridge.Direct(to)), s
}

// Watermill's own suite, on Redis Streams.
func TestRedisStreams(t *testing.T) {
	t.Parallel()
	options, err := redis.ParseURL(redistest.URL(t))
	if err != nil {
		t.Fatal(err)
	}
	options.PoolSize, options.ContextTimeoutEnabled = 500, true // each subscription needs a connection
	client := redis.NewClient(options)
	t.Cleanup(func() {
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	})
	to, err := outboxredis.NewPublisher(client, outboxredis.Config{
		Timeout: testenv.Patience,
		Router:  func(m outbox.Message) outbox.Route { return outbox.Route{Exchange: m.Name} },
	})
	if err != nil {
		t.Fatal(err)
	}
	inGroup := func(t *testing.T, group string) (message.Publisher, message.Subscriber) {
		t.Helper()
		return bridge(t, to, func(topic string, p inbox.Processor) (watermillbridge.Consumer, error) {
			return inboxredis.NewConsumer(client, inboxredis.Stream{Name: topic, Timeout: testenv.Patience}, p, named(oneByOne, group))
		})
	}
	features := tests.Features{ForceShort: short, ConsumerGroups: true, GuaranteedOrder: true, GuaranteedOrderWithSingleSubscriber: true, Persistent: true}
	tests.TestPubSub(t, features, func(t *testing.T) (message.Publisher, message.Subscriber) { return inGroup(t, "suite") }, inGroup)
}

// Watermill's own suite, on RabbitMQ: a topic is a queue, so there are no groups.
func TestRabbitMQ(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	to, err := outboxamqp.NewPublisher(b.Dial, outboxamqp.Config{Timeout: testenv.Patience})
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- to.Run(ctx) }()
	t.Cleanup(func() {
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	open := func(t *testing.T) (message.Publisher, message.Subscriber) {
		t.Helper()
		return bridge(t, to, func(topic string, p inbox.Processor) (watermillbridge.Consumer, error) {
			return inboxamqp.NewConsumer(b.Dial, inboxamqp.Queue{Name: topic, Timeout: testenv.Patience}, p, oneByOne)
		})
	}
	features := tests.Features{ForceShort: short, GuaranteedOrder: true, GuaranteedOrderWithSingleSubscriber: true, Persistent: true}
	tests.TestPubSub(t, features, open, nil)
}

// consumer runs until its context ends. The test calls its processor.
type consumer struct {
	inbox.Processor
	fail error
}

func (c *consumer) Setup(context.Context) error { return c.fail }

func (c *consumer) Run(ctx context.Context) error {
	<-ctx.Done()
	return c.fail
}

// subscribed returns a subscription, and a function that processes a message as its consumer does.
func subscribed(t *testing.T) (*watermillbridge.Subscriber, <-chan *message.Message, func(context.Context, *inbox.Message) error) {
	t.Helper()
	c := &consumer{}
	s := watermillbridge.NewSubscriber(func(_ string, p inbox.Processor) (watermillbridge.Consumer, error) {
		c.Processor = p
		return c, nil
	})
	out, err := s.Subscribe(t.Context(), "order.placed")
	if err != nil {
		t.Fatal(err)
	}
	return s, out, func(ctx context.Context, m *inbox.Message) error { return c.Process(ctx, []*inbox.Message{m})[0] }
}

// sent returns the outbox message of a published message.
func sent(t *testing.T, topic string, m *message.Message) outbox.Message {
	t.Helper()
	var all []outbox.Message
	p := watermillbridge.NewPublisher(func(_ context.Context, m outbox.Message) error {
		all = append(all, m)
		return nil
	})
	if err := p.Publish(topic, m); err != nil || len(all) != 1 {
		t.Fatalf("%d messages, %v", len(all), err)
	}
	return all[0]
}

// A message that is published and received keeps UUID, metadata and payload, whatever its UUID is.
func TestThereAndBack(t *testing.T) {
	t.Parallel()
	v7 := uuid.Must(uuid.NewV7()).String()
	for _, id := range []string{v7, strings.ToUpper(v7), uuid.NewString(), "mine", ""} {
		for payload, typ := range map[string]string{`{"a":1}`: "application/json", "x": "application/octet-stream", "": "application/octet-stream"} {
			m := message.NewMessage(id, message.Payload(payload))
			m.Metadata = message.Metadata{"tenant": "a", watermillbridge.MetadataKey: "A-1"}
			out := sent(t, "order.placed", m)
			if out.Name != "order.placed" || out.Key != "A-1" || out.ContentType != typ || out.ID.Version() != 7 || id == v7 && out.ID.String() != v7 {
				t.Errorf("%q of %q went out as %+v", payload, id, out)
			}
			s, messages, process := subscribed(t)
			done := make(chan error, 1)
			go func() {
				done <- process(t.Context(), &inbox.Message{ID: out.ID, Name: out.Name, Body: out.Body, ContentType: out.ContentType, Key: out.Key, Headers: out.Headers})
			}()
			back := <-messages
			want := message.Metadata{"tenant": "a", watermillbridge.MetadataKey: "A-1", "Content-Type": typ}
			if back.UUID != id || string(back.Payload) != payload || !maps.Equal(back.Metadata, want) {
				t.Errorf("%q of %q came back as %q, %q, %v", payload, id, back.UUID, back.Payload, back.Metadata)
			}
			back.Ack()
			if err := errors.Join(<-done, s.Close()); err != nil {
				t.Error(err)
			}
		}
	}
}

// A content type in the metadata is not guessed, and messages that no outbox accepts are rejected.
func TestContentType(t *testing.T) {
	t.Parallel()
	m := message.NewMessage("", message.Payload("1"))
	m.Metadata.Set("Content-Type", "text/plain")
	if out := sent(t, "a", m); out.ContentType != "text/plain" || out.Headers["Content-Type"] != "" {
		t.Errorf("went out as %+v", out)
	}
	p := watermillbridge.NewPublisher(watermillbridge.Direct(refusing{}))
	if _, ok := errors.AsType[*outbox.MessageError](p.Publish("No Topic", m)); !ok {
		t.Errorf("an invalid topic: %v", p.Publish("No Topic", m))
	}
	if err := p.Publish("topic", m); !errors.Is(err, errRefused) {
		t.Errorf("the broker's rejection: %v", err)
	}
	if err := watermillbridge.NewPublisher(nil).Publish("topic", m); err == nil {
		t.Error("published without a function")
	}
}

var errRefused = errors.New("refused")

type refusing struct{}

func (refusing) Publish(_ context.Context, _ driver.Message, done func(error)) { done(errRefused) }

// The results of the answers for the consumer.
func TestAnswers(t *testing.T) {
	t.Parallel()
	type outcome struct {
		action  inboxdriver.Action
		counted bool
	}
	for name, tt := range map[string]struct {
		answer func(s *watermillbridge.Subscriber, out <-chan *message.Message)
		want   outcome
	}{
		"ack":                         {func(_ *watermillbridge.Subscriber, out <-chan *message.Message) { (<-out).Ack() }, outcome{}},
		"nack":                        {func(_ *watermillbridge.Subscriber, out <-chan *message.Message) { (<-out).Nack() }, outcome{inboxdriver.ActionRetry, false}},
		"no answer":                   {func(_ *watermillbridge.Subscriber, out <-chan *message.Message) { <-out }, outcome{inboxdriver.ActionRetry, true}},
		"nobody reads":                {func(*watermillbridge.Subscriber, <-chan *message.Message) {}, outcome{inboxdriver.ActionRetry, false}},
		"closed while nobody reads":   {func(s *watermillbridge.Subscriber, _ <-chan *message.Message) { _ = s.Close() }, outcome{inboxdriver.ActionReturn, false}},
		"closed before the answer":    {func(s *watermillbridge.Subscriber, out <-chan *message.Message) { <-out; _ = s.Close() }, outcome{inboxdriver.ActionReturn, false}},
		"closed together with an ack": {func(s *watermillbridge.Subscriber, out <-chan *message.Message) { (<-out).Ack(); _ = s.Close() }, outcome{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s, out, process := subscribed(t)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				done := make(chan error, 1)
				go func() { done <- process(ctx, &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: "order.placed"}) }()
				synctest.Wait()
				tt.answer(s, out)
				if f := inboxdriver.Classify(<-done); (outcome{f.Action, f.Counted}) != tt.want {
					t.Errorf("%+v, want %+v", f, tt.want)
				}
				if err := s.Close(); err != nil {
					t.Error(err)
				}
				if _, open := <-out; open {
					t.Error("the channel is open after Close")
				}
			})
		})
	}
}

// Errors of consumers reach the caller, and a closed Subscriber takes no subscription.
func TestSubscriberErrors(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	s := watermillbridge.NewSubscriber(func(topic string, _ inbox.Processor) (watermillbridge.Consumer, error) {
		if topic == "none" {
			return nil, broken
		}
		return &consumer{fail: broken}, nil
	})
	for _, topic := range []string{"none", "a"} {
		if _, err := s.Subscribe(t.Context(), topic); !errors.Is(err, broken) {
			t.Errorf("Subscribe to %s: %v", topic, err)
		}
		if err := s.SubscribeInitialize(topic); !errors.Is(err, broken) {
			t.Errorf("SubscribeInitialize of %s: %v", topic, err)
		}
	}
	s, _, _ = subscribed(t)
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
	if _, err := s.Subscribe(t.Context(), "a"); err == nil {
		t.Error("a closed Subscriber accepts a subscription")
	}
}

// kept is a publisher that keeps the last message.
type kept struct{ driver.Message }

func (k *kept) Publish(_ context.Context, m driver.Message, done func(error)) {
	k.Message = m
	done(nil)
}

// A message that bypasses the outbox, which would set its time, has one, too.
func TestDirectSetsTheTime(t *testing.T) {
	t.Parallel()
	var to kept
	begin := time.Now()
	if err := watermillbridge.Direct(&to)(t.Context(), outbox.Message{Name: "order.placed", Body: []byte("{}")}); err != nil {
		t.Fatal(err)
	}
	if at := to.CreatedAt; at.Before(begin) || at.After(time.Now()) {
		t.Errorf("sent with the time %v", at)
	}
}

// named returns a consumer's config with a name.
func named(cfg inbox.ConsumerConfig, name string) inbox.ConsumerConfig {
	cfg.Name = name
	return cfg
}
