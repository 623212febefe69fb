package faults_test

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// badKind is a kind of message that the broker does not take, or that is no message.
type badKind struct {
	name  string
	route func(n int) outbox.Route
	body  []byte
	spoil string // run on its row
	rate  int    // a second; 0 means fifty, or what leaves the machine room for the good ones
}

func always(r outbox.Route) func(int) outbox.Route { return func(int) outbox.Route { return r } }

var badKinds = []badKind{
	{name: "exchange internal", route: always(outbox.Route{Exchange: "amq.rabbitmq.trace"})},
	{name: "exchange closed", route: always(outbox.Route{Exchange: "closed"})},
	{name: "exchange missing", route: always(outbox.Route{Exchange: "missing"})},
	{name: "exchanges missing", route: func(n int) outbox.Route { return outbox.Route{Exchange: "missing." + strconv.Itoa(n)} }},
	{name: "topic closed", route: always(outbox.Route{Exchange: exchange, RoutingKey: "secret"})},
	{name: "topics closed", route: func(n int) outbox.Route {
		return outbox.Route{Exchange: exchange, RoutingKey: "secret." + strconv.Itoa(n)}
	}},
	{name: "topics cut off", route: func(n int) outbox.Route {
		return outbox.Route{Exchange: exchange, RoutingKey: fmt.Sprintf("%0240d.%d", 0, n)}
	}},
	{name: "unroutable", route: always(outbox.Route{Exchange: exchange, RoutingKey: "open.nowhere"})},
	{name: "too large", route: always(outbox.Route{Exchange: exchange}), body: bytes.Repeat([]byte("1"), maxSize+1)},
	{name: "unreadable", route: always(outbox.Route{Exchange: exchange}), spoil: `UPDATE holdfast_outbox SET headers = '[1]' WHERE id = $1`},
	{name: "connection ended", route: always(outbox.Route{RoutingKey: breaking}), rate: 2}, // costs a handshake each time
}

// flow is a steady stream of good messages, and what is known of each.
type flow struct {
	store  *store
	writer *outboxpgx.Store

	mu      sync.Mutex
	phase   string
	sent    map[uuid.UUID]sent
	arrived map[uuid.UUID]time.Time
	order   []string // of the phases
}

type sent struct {
	phase string
	at    time.Time
}

func newFlow(t *testing.T, s *store) *flow {
	t.Helper()
	writer, err := outboxpgx.New(s.pool, outboxpgx.Config{PollOnly: true, Logger: quiet})
	must(t, err)
	return &flow{store: s, writer: writer, sent: map[uuid.UUID]sent{}, arrived: map[uuid.UUID]time.Time{}}
}

func (f *flow) write(ctx context.Context, m outbox.Message, spoil string) error {
	return pgx.BeginFunc(ctx, f.store.pool, func(tx pgx.Tx) error {
		if err := f.writer.Write(ctx, tx, m); err != nil || spoil == "" {
			return err
		}
		_, err := tx.Exec(ctx, spoil, m.ID)
		return err
	})
}

// run writes a hundred good messages a second, every second one with a key.
func (f *flow) run(ctx context.Context) error {
	for n := 0; runloop.Sleep(ctx, 10*time.Millisecond) == nil; n++ {
		m := outbox.Message{ID: ids.New(), Name: name, Body: []byte(`{}`), Route: outbox.Route{Exchange: exchange}}
		if n%2 == 0 {
			m.Key = ledger.KeyOf(n % ledger.Keys)
		}
		if err := f.write(context.WithoutCancel(ctx), m, ""); err != nil {
			return err
		}
		f.mu.Lock()
		f.sent[m.ID] = sent{f.phase, time.Now()}
		f.mu.Unlock()
	}
	return nil
}

// spoil writes bad messages at a rate until stop is called.
func (f *flow) spoil(t *testing.T, perSecond int, kinds ...badKind) (stop func()) {
	t.Helper()
	return beside(t, func(ctx context.Context) error {
		for n := 0; runloop.Sleep(ctx, time.Second/time.Duration(perSecond)) == nil; n++ {
			kind := kinds[n%len(kinds)]
			m := outbox.Message{ID: ids.New(), Name: "bad", Route: kind.route(n), Body: kind.body}
			if m.Body == nil {
				m.Body = []byte(`{}`)
			}
			if err := f.write(context.WithoutCancel(ctx), m, kind.spoil); err != nil {
				return err
			}
		}
		return nil
	})
}

// enter has what is written from now on belong to a phase.
func (f *flow) enter(phase string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.phase = phase
	if !slices.Contains(f.order, phase) {
		f.order = append(f.order, phase)
	}
}

// consume notes when each message arrives first.
func (f *flow) consume(url, queue string) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		return ledger.OnBroker(ctx, url, func(ch *amqp.Channel) error {
			deliveries, err := ch.Consume(queue, "", true, false, false, false, nil)
			if err != nil {
				return err
			}
			for {
				select {
				case <-ctx.Done():
					return nil
				case d, open := <-deliveries:
					if !open {
						return ledger.ErrEnded
					}
					f.mu.Lock()
					if id, err := uuid.Parse(d.MessageId); err == nil && f.arrived[id].IsZero() {
						f.arrived[id] = time.Now()
					}
					f.mu.Unlock()
				}
			}
		})
	}
}

// untilAllArrived waits for all good messages.
func (f *flow) untilAllArrived(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		missing := 0
		for id := range f.sent {
			if f.arrived[id].IsZero() {
				missing++
			}
		}
		if missing > 0 {
			return fmt.Errorf("%d of %d good messages have not arrived", missing, len(f.sent))
		}
		return nil
	})
}

// written is how many good messages of a phase there are.
func (f *flow) written(phase string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, s := range f.sent {
		if s.phase == phase {
			n++
		}
	}
	return n
}

// latencies are those of the good messages of a phase, sorted.
func (f *flow) latencies(phase string) []time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []time.Duration
	for id, s := range f.sent {
		if s.phase == phase {
			all = append(all, f.arrived[id].Sub(s.at))
		}
	}
	slices.Sort(all)
	return all
}

// The latency of good messages beside a stream of bad ones is that of a second outbox without them,
// at the same time and on the same broker, within a factor: where bad messages stop the others, these
// wait for many seconds. A message that ends the connection costs the others a handshake, so few of
// those come in a second.
func TestOutboxStreamsOfBadMessages(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.RabbitMQ, "max_message_size = "+strconv.Itoa(maxSize))
	for _, kind := range []string{"classic", "quorum"} {
		t.Run(kind, func(t *testing.T) { // one after the other: each ends connections of the same broker all the time
			b := amqptest.On(t, server.URL(), server.AdminURL())
			b.Exchange(t, exchange, "topic")
			b.Exchange(t, "closed", "topic")
			user := b.User(t, "relay", amqptest.Rights{
				Write: "^(" + exchange + "|amq.default|amq.rabbitmq.trace)$", Topics: map[string]string{exchange: `^(faults|open|holdfast\.slot)\.`},
			})
			s := newStore(t, pgtest.URL(t))
			f, stop := s.flow(t, b, user.URL, queue, kind)
			control, stopControl := newStore(t, pgtest.URL(t)).flow(t, b, user.URL, "control", kind)
			during := func(phase string, d time.Duration) {
				control.enter(phase)
				f.enter(phase)
				time.Sleep(d)
				untilTrue(t, "both have written", func() bool { return min(f.written(phase), control.written(phase)) >= 20 })
			}

			short := 2 * time.Second
			calm := 5 * time.Second
			during("before", calm)
			fast := min(50, max(5, control.written("before")/int(calm.Seconds())*2/3))
			t.Logf("%d bad messages a second", fast)
			for range scaled(t, 1) {
				for _, bad := range badKinds {
					stop := f.spoil(t, cmp.Or(bad.rate, fast), bad)
					during(bad.name, short)
					stop()
				}
				stop := f.spoil(t, 2, badKinds...)
				during("all, two a second", 2*short)
				stop()
			}
			during("", short) // what has failed is tried again, and given up
			during("after", calm)
			stopControl()
			stop()

			f.compare(t, control)
			if n := s.count(`SELECT count(*) FROM holdfast_outbox_dead WHERE name = $1`, name); n > 0 {
				t.Errorf("%d good messages are dead letters", n)
			}
		})
	}
}

// flow begins a steady stream of good messages through the store, a relay and a queue of its own. Stop
// waits until all have arrived.
func (s *store) flow(t *testing.T, b *amqptest.Broker, url, queue, kind string) (f *flow, stop func()) {
	t.Helper()
	b.Queue(t, queue, amqp.Table{"x-queue-type": kind})
	b.Bind(t, queue, "faults.#", exchange)
	f = newFlow(t, s)
	publisher, err := outboxamqp.NewPublisher(outboxamqp.Dial(url, amqp.Config{}), outboxamqp.Config{Logger: quiet})
	must(t, err)
	messages, err := outboxpgx.New(s.pool, outboxpgx.Config{Logger: quiet})
	must(t, err)
	relay, err := outbox.NewRelay(messages, publisher, outbox.RelayConfig{
		PollInterval: 100 * time.Millisecond, Logger: quiet,
		Retry: outbox.RetryPolicy{MaxAttempts: poisonAttempts, BaseDelay: 200 * time.Millisecond},
	})
	must(t, err)
	stopRelay := beside(t, relay.Run)
	beside(t, f.consume(b.URL, queue))
	stopWriting := beside(t, f.run)
	return f, func() {
		stopWriting()
		f.untilAllArrived(t)
		stopRelay()
	}
}

// compare fails the test over a phase that is much slower than the control's at the same time.
func (f *flow) compare(t *testing.T, control *flow) {
	t.Helper()
	const most = 10
	trifle := time.Second // what a busy machine does to one of the two now and then is less
	if !long(t) {
		trifle = 3 * time.Second
	}
	for _, phase := range f.order {
		all, usual := f.latencies(phase), control.latencies(phase)
		t.Logf("%-20s %5d messages, median %8.1f ms, nine tenths within %8.1f ms; without bad ones %8.1f ms, %8.1f ms",
			phase, len(all), tenths(all, 5), tenths(all, 9), tenths(usual, 5), tenths(usual, 9))
		if len(all) == 0 || len(usual) == 0 {
			t.Errorf("%s: no good message was written", phase)
		} else if all[len(all)/2] > max(most*usual[len(usual)/2], trifle) {
			t.Errorf("%s: half of the good messages took more than %.1f ms, and %.1f ms where there are no bad ones",
				phase, tenths(all, 5), tenths(usual, 5))
		}
	}
}

// tenths returns, in milliseconds, within what so many tenths are.
func tenths(sorted []time.Duration, n int) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[len(sorted)*n/10].Seconds() * 1000
}
