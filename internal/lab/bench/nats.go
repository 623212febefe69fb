package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wnats "github.com/ThreeDotsLabs/watermill-nats/v2/pkg/nats"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/nats/inboxnats"
	"github.com/holdfast-go/holdfast/modules/nats/outboxnats"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

func natsWorkload() workload {
	return workload{"nats", []part{{"publish", benchNATSPublish}, {"consume", benchNATSConsume}}}
}

// The yardsticks.
const (
	asyncAlone = "PublishMsgAsync alone, raw client"
	pullAlone  = "pull consumer alone, raw client"
)

// benchNATSPublish sends messages to a stream on disk, with an acknowledgement and a duplicate check for each. The relay
// also reads them from Postgres.
func benchNATSPublish(ctx context.Context, b *bench) {
	s := newNATSStream(ctx, b)
	publishers := strconv.Itoa(watermillTopics)
	b.measure(ctx, table{
		title:      fmt.Sprintf("nats, publish %d messages of %d bytes", b.messages, len(body)),
		columns:    []string{"messages/s", "client us/message"},
		yardsticks: []string{asyncAlone},
		contenders: []contender{
			s.contender(asyncAlone, s.published, s.publishAlone),
			s.contender("holdfast", s.published, s.holdfastPublish),
			s.contender("holdfast, relay from Postgres", s.published, s.relayFrom(newNATSDrain(ctx, b))),
			s.contender("watermill publisher, "+publishers+" goroutines", s.published, s.watermillPublish),
		},
	})
}

// benchNATSConsume takes messages from a stream, decodes and acknowledges each. Their handlers do nothing. The window of each
// is 1,000 messages, which the server gives a subscriber of Watermill by itself; the last two show the default of ours.
func benchNATSConsume(ctx context.Context, b *bench) {
	s := newNATSStream(ctx, b)
	b.measure(ctx, table{
		title:      fmt.Sprintf("nats, consume %d messages of %d bytes", b.messages, len(body)),
		columns:    []string{"messages/s", "client us/message"},
		yardsticks: []string{pullAlone},
		contenders: []contender{
			s.contender(pullAlone, s.consumed, s.pullAlone(natsWindow)),
			s.contender("holdfast", s.consumed, s.holdfastConsume(natsWindow)),
			s.contender("watermill router, 8 subscribers, asynchronous acks", nil, s.watermillConsume),
			s.contender("holdfast, a window of 16", s.consumed, s.holdfastConsume(0)),
			s.contender("pull consumer alone, a window of 16", s.consumed, s.pullAlone(16)),
		},
	})
}

// natsStream is a stream that every run creates again.
type natsStream struct {
	bench *bench
	url   string
	conn  *nats.Conn
	js    jetstream.JetStream
	name  string
}

// natsWindow is how many messages are not acknowledged yet, as in package outboxnats.
const natsWindow = 1000

func newNATSStream(ctx context.Context, b *bench) *natsStream {
	url := b.server(ctx, testenv.NATS, testenv.NATSVar)
	conn := must(nats.Connect(url, nats.MaxReconnects(-1)))
	b.atEnd(func() error {
		conn.Close()
		return nil
	})
	js := must(jetstream.New(conn, jetstream.WithPublishAsyncMaxPending(natsWindow), jetstream.WithDefaultTimeout(time.Minute)))
	s := &natsStream{bench: b, url: url, conn: conn, js: js, name: "bench" + strconv.FormatInt(time.Now().UnixNano(), 36)}
	b.atEnd(func() error { return s.clear(context.WithoutCancel(ctx)) })
	return s
}

// clear deletes the stream, and the streams that the consumer of package inboxnats made.
func (s *natsStream) clear(ctx context.Context) error {
	own := s.name + "=" + streamGroup + "="
	for _, name := range []string{s.name, own + "retries", own + "dead"} {
		if err := s.js.DeleteStream(ctx, name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return err
		}
	}
	return nil
}

func (s *natsStream) subject() string { return s.name + "." + eventName }

// contender makes run publish or consume the messages, and fewer to warm up. done fails until all is done; nil: run has
// waited.
func (s *natsStream) contender(name string, done func(ctx context.Context, n int) error, run drainRun) contender {
	return contender{name, func(ctx context.Context, length time.Duration) sample {
		n := s.bench.portion(length, 1)
		check(s.clear(ctx))
		must(s.js.CreateStream(ctx, jetstream.StreamConfig{Name: s.name, Subjects: []string{s.name + ".>"}}))
		watch := stopwatch{bench: s.bench}
		run(ctx, n, &watch)
		check(watch.err)
		if done != nil {
			until(ctx, n, done)
		}
		return watch.sample(n)
	}}
}

// until waits for done. The last acks may be on their way.
func until(ctx context.Context, n int, done func(ctx context.Context, n int) error) {
	for began := time.Now(); ; check(runloop.Sleep(ctx, 10*time.Millisecond)) {
		err := done(ctx, n)
		if err == nil {
			return
		}
		if time.Since(began) > 10*time.Second {
			check(err)
		}
	}
}

// published fails unless the stream has each message once.
func (s *natsStream) published(ctx context.Context, n int) error {
	stream, err := s.js.Stream(ctx, s.name)
	if err == nil && stream.CachedInfo().State.Msgs != uint64(n) {
		err = fmt.Errorf("%d messages in the stream, want %d", stream.CachedInfo().State.Msgs, n)
	}
	return err
}

// consumed fails unless each message was acknowledged. The older client knows both pull and push consumers.
func (s *natsStream) consumed(ctx context.Context, n int) error {
	js, err := s.conn.JetStream()
	if err != nil {
		return err
	}
	info, err := js.ConsumerInfo(s.name, streamGroup, nats.Context(ctx))
	if err != nil {
		return err
	}
	if info.AckFloor.Stream != uint64(n) {
		return fmt.Errorf("%d of %d messages are acknowledged", info.AckFloor.Stream, n)
	}
	return nil
}

// message has an id, as those of all contenders.
func (s *natsStream) message() *nats.Msg {
	id := ids.New().String()
	return &nats.Msg{Subject: s.subject(), Data: body, Header: nats.Header{
		nats.MsgIdHdr: {id}, "holdfast-name": {eventName}, wnats.WatermillUUIDHdr: {id},
	}}
}

func (s *natsStream) publishAlone(ctx context.Context, n int, watch *stopwatch) int {
	watch.start()
	s.fill(ctx, n)
	watch.stop()
	return n
}

// fill publishes n messages.
func (s *natsStream) fill(ctx context.Context, n int) {
	acks := make(chan jetstream.PubAckFuture, natsWindow)
	sent := make(chan error, 1)
	go func() {
		defer close(acks)
		for range n {
			ack, err := s.js.PublishMsgAsync(s.message(), jetstream.WithStallWait(time.Minute))
			if err != nil {
				sent <- err
				return
			}
			acks <- ack
		}
		sent <- nil
	}()
	var failed error
	for ack := range acks {
		select {
		case <-ack.Ok():
		case err := <-ack.Err():
			failed = errors.Join(failed, err)
		case <-ctx.Done():
			failed = ctx.Err()
		}
	}
	check(errors.Join(failed, <-sent))
}

func (s *natsStream) publisher() *outboxnats.Publisher {
	return must(outboxnats.NewPublisher(s.conn, outboxnats.Config{Topic: s.name}))
}

func (s *natsStream) holdfastPublish(ctx context.Context, n int, watch *stopwatch) int {
	publisher, finish := s.publisher(), newFinish(n, watch)
	watch.start()
	for range n {
		publisher.Publish(ctx, driver.Message{ID: ids.New(), Name: eventName, Body: body}, func(err error) {
			if err == nil {
				finish.one()
			}
		})
	}
	check(finish.wait(ctx))
	return n
}

// newNATSDrain returns the outbox of the relay.
func newNATSDrain(ctx context.Context, b *bench) *drain {
	pool := b.postgres(ctx)
	store := must(outboxpgx.New(pool, outboxpgx.Config{Logger: quiet}))
	check(store.Migrate(ctx))
	return &drain{bench: b, pool: pool, store: store, brokerQueue: brokerQueue{queue: eventName}}
}

func (s *natsStream) relayFrom(d *drain) drainRun {
	return func(ctx context.Context, n int, watch *stopwatch) int {
		must(d.pool.Exec(ctx, "TRUNCATE holdfast_outbox"))
		d.fill(ctx, n, 0)
		check(d.relay(ctx, s.publisher(), n, watch))
		return n
	}
}

// watermillPublish has many goroutines, because each call waits for its acknowledgement.
func (s *natsStream) watermillPublish(_ context.Context, n int, watch *stopwatch) int {
	publisher := must(wnats.NewPublisher(wnats.PublisherConfig{
		URL: s.url, Marshaler: &wnats.NATSMarshaler{}, JetStream: wnats.JetStreamConfig{TrackMsgId: true},
	}, watermill.NopLogger{}))
	errs := make([]error, watermillTopics)
	var running sync.WaitGroup
	watch.start()
	for i := range watermillTopics {
		running.Go(func() {
			for k := i; k < n && errs[i] == nil; k += watermillTopics {
				errs[i] = publisher.Publish(s.subject(), message.NewMessage(ids.New().String(), body))
			}
		})
	}
	running.Wait()
	watch.stop()
	check(errors.Join(errors.Join(errs...), publisher.Close()))
	return n
}

func (s *natsStream) pullAlone(window int) drainRun {
	return func(ctx context.Context, n int, watch *stopwatch) int {
		s.fill(ctx, n)
		consumer := must(s.js.CreateConsumer(ctx, s.name, jetstream.ConsumerConfig{Durable: streamGroup, AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: -1}))
		finish := newFinish(n, watch)
		watch.start()
		running := must(consumer.Consume(func(m jetstream.Msg) {
			var v string
			if json.Unmarshal(m.Data(), &v) == nil && m.Ack() == nil {
				finish.one()
			}
		}, jetstream.PullMaxMessages(window)))
		defer running.Stop()
		check(finish.wait(ctx))
		return n
	}
}

// holdfastConsume has the default window if window is 0.
func (s *natsStream) holdfastConsume(window int) drainRun {
	return func(ctx context.Context, n int, watch *stopwatch) int {
		mux := inbox.NewMux()
		check(inbox.Handle(mux, eventName, func(context.Context, string) error { return nil }))
		consumer := must(inboxnats.NewConsumer(s.conn, inboxnats.Stream{Name: s.name}, counted{mux, newFinish(n, watch)},
			inbox.ConsumerConfig{Name: streamGroup, Prefetch: window, MessageLimit: n, Logger: quiet}))
		check(consumer.Setup(ctx))
		s.fill(ctx, n)
		watch.start()
		check(consumer.Run(ctx))
		return n
	}
}

func (s *natsStream) watermillConsume(ctx context.Context, n int, watch *stopwatch) int {
	s.fill(ctx, n)
	logger := watermill.NopLogger{}
	subscriber := must(wnats.NewSubscriber(wnats.SubscriberConfig{
		URL: s.url, QueueGroupPrefix: streamGroup, SubscribersCount: 8, Unmarshaler: &wnats.NATSMarshaler{},
		JetStream: wnats.JetStreamConfig{
			DurablePrefix: streamGroup, AckAsync: true, SubscribeOptions: []nats.SubOpt{nats.DeliverAll(), nats.AckExplicit()},
		},
	}, logger))
	router := must(message.NewRouter(message.RouterConfig{}, logger))
	finish := newFinish(n, watch)
	router.AddConsumerHandler("bench", s.subject(), subscriber, func(m *message.Message) error {
		var v string
		if err := json.Unmarshal(m.Payload, &v); err != nil {
			return err
		}
		finish.one()
		return nil
	})
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	watch.start()
	go func() { ended <- router.Run(running) }()
	check(finish.wait(ctx))
	until(ctx, n, s.consumed) // closing deletes the consumer
	check(errors.Join(router.Close(), <-ended))
	_ = subscriber.Close() // the router has closed it
	return n
}
