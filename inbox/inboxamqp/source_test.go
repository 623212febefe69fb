package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/partition"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/trace/parked"
)

// newSource returns a running source of a queue that exists.
func newSource(t *testing.T, dial func(context.Context) (*amqp.Connection, error), cfg config) driver.Source {
	t.Helper()
	c := newConsumer(t, dial, &recorder{}, cfg)
	setUp(t, c)
	return runSource(t, c)
}

// runSource returns the source of a consumer. It runs until the test ends.
func runSource(t *testing.T, c *inboxamqp.Consumer) driver.Source {
	t.Helper()
	src := inboxamqp.SourceOf(c)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		src.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return src
}

// open starts a session that ends with the test.
func open(t *testing.T, src driver.Source, window int) driver.Session {
	t.Helper()
	s, err := src.Open(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = s.Close(context.Background()) }) // the test may have closed it
	must(t, s.Start(t.Context(), window))
	return s
}

// take receives n deliveries.
func take(t *testing.T, s driver.Session, n int) (ds []driver.Delivery) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	for len(ds) < n {
		more, err := s.Receive(ctx, n-len(ds))
		if err != nil {
			t.Fatalf("%d of %d messages: %v", len(ds), n, err)
		}
		ds = append(ds, more...)
	}
	return ds
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// numbered publishes messages with the numbers from first to last as bodies.
func numbered(t *testing.T, b *amqptest.Broker, queue string, first, last int) {
	t.Helper()
	for n := first; n <= last; n++ {
		p := order()
		p.Body = fmt.Append(nil, n)
		b.Publish(t, "", queue, p)
	}
}

func bodies(ds []driver.Delivery) string {
	var all []string
	for _, d := range ds {
		all = append(all, string(d.Message().Body))
	}
	return strings.Join(all, " ")
}

// later returns moves to wait for a delay.
func later(delay time.Duration, ds ...driver.Delivery) (moves []driver.Move) {
	for _, d := range ds {
		moves = append(moves, driver.Move{Delivery: d, Target: driver.ToLater, Delay: delay, Next: driver.Progress{Attempt: 2}})
	}
	return moves
}

func TestSourceMissing_namesSetup(t *testing.T) {
	t.Parallel()
	src := inboxamqp.SourceOf(newConsumer(t, amqptest.New(t).Dial, &recorder{}, config{}))
	if _, err := src.Open(t.Context()); !errors.Is(err, driver.ErrMissing) || !strings.Contains(err.Error(), "call Consumer.Setup") {
		t.Errorf("open: %v", err)
	}
}

// Each copy of a batch fails independently.
func TestSourceMove(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	src := newSource(t, b.Dial, config{Retry: quick, Classes: []string{"full", "gone"}})
	must(t, deleteQueue(t, b, "orders.failed.gone"))
	b.Full(t, "orders.failed.full")
	for n := range 5 {
		p := order()
		p.Body = fmt.Append(nil, n)
		p.Headers = amqp.Table{"holdfast-key": "k7", "tenant": "acme", "holdfast-fake": strings.Repeat("x", 9<<10)}
		b.Publish(t, "", "orders", p)
	}
	s := open(t, src, 10)
	ds := take(t, s, 5)
	failedAt := time.Now().UTC().Truncate(time.Millisecond)
	letter := func(d driver.Delivery, class string) inbox.DeadLetter {
		return inbox.DeadLetter{
			Message: *d.Message(), Class: class, Error: "broken", Attempts: 3, FirstFailedAt: failedAt, FailedAt: failedAt, Consumer: "me",
		}
	}
	errs := src.Move(t.Context(), []driver.Move{
		{Delivery: ds[0], Target: driver.ToDead, DeadLetter: letter(ds[0], "unknown")},
		{Delivery: ds[1], Target: driver.ToDead, DeadLetter: letter(ds[1], "full")},
		{Delivery: ds[2], Target: driver.ToDead, DeadLetter: letter(ds[2], "gone")},
		{Delivery: ds[3], Target: driver.ToLater, Delay: 100 * time.Millisecond, Next: driver.Progress{Attempt: 3, Recovered: 1, FirstFailedAt: failedAt}},
		{Delivery: ds[4], Target: driver.ToTail, Next: driver.Progress{Attempt: 1}},
	})
	for i, err := range errs {
		if refused := errors.Is(err, driver.ErrRefused); refused != (i == 1 || i == 2) || !refused && err != nil {
			t.Errorf("move %d: %v", i, err)
		}
	}
	must(t, s.Ack(t.Context(), []driver.Delivery{ds[0], ds[3], ds[4]}, false), s.GiveBack(t.Context(), ds[1:3]))
	for _, d := range take(t, s, 4) {
		m := d.Message()
		attempt, recovered, first := 1, 0, time.Time{}
		if string(m.Body) == "3" {
			attempt, recovered, first = 3, 1, failedAt
		}
		if m.Attempt != attempt || m.Recovered != recovered || !m.FirstFailedAt.Equal(first) ||
			m.Key != "k7" || m.Headers["tenant"] != "acme" || m.ID == (inbox.Message{}).ID {
			t.Errorf("came again as %+v", m)
		}
	}
	dead := b.Take(t, "orders.failed.default", 1, testenv.Patience)[0]
	if string(dead.Body) != "0" || dead.Headers["holdfast-failure-class"] != "unknown" || dead.Headers["tenant"] != "acme" {
		t.Errorf("dead letter %s %v", dead.Body, dead.Headers)
	}
}

func deleteQueue(t *testing.T, b *amqptest.Broker, name string) error {
	t.Helper()
	_, err := b.Channel(t).QueueDelete(name, false, false, false)
	return err
}

// If the user may not publish to a queue, no message is lost, the other copies of the batch succeed, and the
// session continues.
func TestSourceForbidden(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	afterSetup(t, b, config{})
	user := b.User(t, "reader", amqptest.Rights{Read: ".*"})
	src := runSource(t, newConsumer(t, user.Dial, &recorder{}, config{}))
	numbered(t, b, "orders", 1, 3)
	s := open(t, src, 3)
	ds := take(t, s, 3)
	for _, err := range src.Move(t.Context(), later(time.Second, ds...)) {
		if !errors.Is(err, driver.ErrRefused) {
			t.Errorf("move: %v", err)
		}
	}
	must(t, s.Ack(t.Context(), ds, false), s.Close(t.Context()))
}

// If the headers of a copy do not fit into a frame, the sender's headers are omitted.
func TestSourceTooLarge(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	small := func(ctx context.Context) (*amqp.Connection, error) {
		return amqp.DialConfig(b.URL, amqp.Config{FrameSize: 8 << 10})
	}
	src := newSource(t, small, config{})
	p := order()
	p.Headers = amqp.Table{"holdfast-key": "k", "foreign": strings.Repeat("f", 7970)} // fits until we add ours
	b.Publish(t, "", "orders", p)
	s := open(t, src, 3)
	ds := take(t, s, 1)
	must(t, src.Move(t.Context(), later(0, ds...))...)
	must(t, s.Ack(t.Context(), ds, false))
	if m := take(t, s, 1)[0].Message(); m.Attempt != 2 || m.Key != "k" || m.Headers["foreign"] != "" {
		t.Errorf("came again as %.200v", m)
	}
}

// If a delay queue is missing, messages that wait for the rest of a long delay go behind the others, and Ready
// reports it.
func TestSourceLongDelayRefused(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	src := newSource(t, b.Dial, config{})
	must(t, deleteQueue(t, b, "holdfast.delay.64000"))
	for range 4 {
		p := order()
		p.Headers = amqp.Table{"holdfast-wait": "61000"}
		b.Publish(t, "", "orders", p)
	}
	numbered(t, b, "orders", 1, 3)
	s := open(t, src, 2)
	for range 3 {
		must(t, s.Ack(t.Context(), take(t, s, 1), false))
	}
	if err := src.Ready(t.Context()); err == nil || !strings.Contains(err.Error(), "holdfast.delay") {
		t.Errorf("ready: %v", err)
	}
}

// Waiting acknowledgements are written when their time is over, when the earlier message is requeued, and when the
// session is closed. None of their messages is delivered again.
func TestAcksThatWait(t *testing.T) {
	t.Parallel()
	const window, acked = 20, 3
	for name, tell := range map[string]func(t *testing.T, s driver.Session, first driver.Delivery){
		"time": func(t *testing.T, s driver.Session, _ driver.Delivery) { take(t, s, 1) }, // before, the window has no room for it
		"give back": func(t *testing.T, s driver.Session, first driver.Delivery) {
			must(t, s.GiveBack(t.Context(), []driver.Delivery{first}))
		},
		"close": func(*testing.T, driver.Session, driver.Delivery) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			s := open(t, newSource(t, b.Dial, config{}), window)
			numbered(t, b, "orders", 1, window+1)
			ds := take(t, s, window)
			must(t, s.Ack(t.Context(), ds[1:1+acked], true))
			tell(t, s, ds[0])
			must(t, s.Close(t.Context()))
			awaitDepth(t, b, "orders", window+1-acked)
		})
	}
}

// The suites run completely on quorum queues. On the other queues only the subtests run that depend on the queue
// type.
func TestSource(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, cfg := range map[string]config{
		"quorum":          {},
		"classic":         {Classic: true},
		"ordered":         {Ordered: true},
		"ordered classic": {Ordered: true, Classic: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if cfg.Classic && cfg.Ordered {
				testenv.Nightly(t, "its parts run with every change")
			}
			own := ownQueues(t, cfg)
			conformance.TestSource(t, conformance.SourceBackend{Runs: runsOf(name), New: func(t *testing.T) conformance.SourceFixture {
				own := own
				if strings.Contains(t.Name(), "/waiting_messages") { // a scan holds the delay queues of the virtual host
					own = ownQueues(t, cfg)
				}
				b, cfg := own()
				f, _ := newSourceFixture(t, b, cfg)
				return f
			}})
		})
	}
}

func runsOf(kind string) conformance.Runs {
	return conformance.Runs{Nightly: testenv.Nightly, Variant: kind != "quorum"}
}

func TestConsumer(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, cfg := range map[string]config{
		"quorum": {}, "classic": {Classic: true}, "ordered": {Ordered: true}, "partitions": {Ordered: true, Partitions: 3, Leveling: 300 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			runs := runsOf(name)
			runs.Variant = cfg.Classic || cfg.Partitions > 0
			own := ownQueues(t, cfg)
			conformance.TestConsumer(t, conformance.ConsumerBackend{
				Runs: runs, Ordered: cfg.Ordered,
				New: func(t *testing.T) conformance.ConsumerFixture { return newConsumerFixture(t, own) },
			})
		})
	}
}

func TestPartitions(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t) // skips before there are subtests
	for name, classic := range map[string]bool{"classic": true, "quorum": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if !classic {
				testenv.Nightly(t, "classic queues are declared sooner")
			}
			own := ownQueues(t, config{Ordered: true, Classic: classic, Partitions: conformance.Partitions, Leveling: 300 * time.Millisecond})
			conformance.TestPartitions(t, conformance.PartitionsBackend{
				Runs: runsOf("partitions"),
				New:  func(t *testing.T) conformance.ConsumerFixture { return newConsumerFixture(t, own) },
				Of: func(m *inbox.Message) int {
					if m.Key == "" {
						return 0
					}
					return partition.Of(m.Key, "", partition.Slots) % conformance.Partitions
				},
			})
		})
	}
}

// ownQueues returns a function that gives each fixture queues of its own on one virtual host. Declaring the twenty delay
// queues of a virtual host costs more than most tests.
func ownQueues(t *testing.T, cfg config) func() (*amqptest.Broker, config) {
	b := amqptest.New(t)
	var fixtures atomic.Int64
	return func() (*amqptest.Broker, config) {
		own := cfg
		own.Queue = fmt.Sprintf("orders%d", fixtures.Add(1))
		return b, own
	}
}

func newConsumerFixture(t *testing.T, own func() (*amqptest.Broker, config)) conformance.ConsumerFixture {
	t.Helper()
	b, base := own()
	sources, dial := newSourceFixture(t, b, base)
	var parts func(*testing.T) []driver.Source
	if base.Partitions > 1 {
		parts = func(t *testing.T) []driver.Source {
			return inboxamqp.PartsOf(newConsumer(t, dial, &recorder{}, base))
		}
	}
	return conformance.ConsumerFixture{
		SourceFixture: sources, Parts: parts,
		Consumer: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) conformance.Consumer {
			c, err := inboxamqp.NewTuned(dial, inboxamqp.Queue{Name: base.Queue, Classic: base.Classic, Partitions: base.Partitions}, p, cfg.ConsumerConfig,
				inboxamqp.Tuning{MaxBodyBytes: cfg.MaxBodyBytes, Leveling: base.Leveling})
			must(t, err)
			setUp(t, c)
			return c
		},
	}
}

func newSourceFixture(t *testing.T, b *amqptest.Broker, cfg config) (f conformance.SourceFixture, dial func(context.Context) (*amqp.Connection, error)) {
	t.Helper()
	proxy := testenv.NewProxy(t, b.URL)
	cfg.Retry, cfg.Classes = quick, []string{conformance.OwnClass}
	direct := newConsumer(t, b.Dial, &recorder{}, cfg)
	setup := func() { setUp(t, direct) }
	setup()
	ch := b.Channel(t)
	must(t, ch.Confirm(false))
	dial = hasty(proxy.URL())
	exchange, key, queue := "", cfg.Queue, cfg.Queue
	if cfg.Partitions > 1 {
		exchange, key, queue = cfg.Queue, "", cfg.Queue+".0"
	}
	return conformance.SourceFixture{
		New: func(t *testing.T) driver.Source {
			return inboxamqp.SourceOf(newConsumer(t, dial, &recorder{}, cfg))
		},
		DeadLetters: func(*testing.T) driver.DeadLetters { return inboxamqp.LettersOf(direct) },
		Publish: func(t *testing.T, msgs ...*inbox.Message) {
			var last *amqp.DeferredConfirmation
			for _, m := range msgs {
				p := amqp.Publishing{
					MessageId: m.ID.String(), Type: m.Name, ContentType: m.ContentType, DeliveryMode: amqp.Persistent,
					ContentEncoding: m.ContentEncoding, CorrelationId: m.CorrelationID, ReplyTo: m.ReplyTo,
					Timestamp: m.PublishedAt, Headers: amqp.Table{}, Body: m.Body,
				}
				for name, value := range m.Headers {
					p.Headers[name] = value
				}
				if m.Key != "" {
					p.Headers["holdfast-key"], p.Headers["CC"] = m.Key, []any{partition.Slot(m.Key)}
				}
				var err error
				last, err = ch.PublishWithDeferredConfirm(exchange, key, true, false, p)
				must(t, err)
			}
			if ok, err := last.WaitContext(t.Context()); err != nil || !ok {
				t.Fatalf("not confirmed: %v", err)
			}
		},
		Network:   proxy,
		Forgetful: !cfg.Classic, // rabbitmq-server#10327
		Delete: func(t *testing.T) func() {
			must(t, deleteQueue(t, b, queue))
			return setup
		},
		Refuse: func(t *testing.T, class string) func() {
			must(t, deleteQueue(t, b, cfg.Queue+".failed."+class))
			return setup
		},
	}, dial
}

// The run of two consumers with ParkKeys is one of the model of parked keys.
func TestParkKeys_runOfTheModel(t *testing.T) {
	t.Parallel()
	testenv.AMQPURL(t)
	b, cfg := ownQueues(t, config{Ordered: true, Classic: true})()
	f, _ := newSourceFixture(t, b, cfg)
	parked.Test(t, f, parked.OnPostgres(t))
}
