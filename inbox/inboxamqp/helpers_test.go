package inboxamqp_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxamqp"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/outbox/format"
)

// The tests mostly wait for servers, so eight run at once.
func TestMain(m *testing.M) {
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	os.Exit(testenv.Run(m))
}

// quick is a policy with three quick retries.
var quick = inbox.RetryPolicy{MaxAttempts: 4, BaseDelay: 100 * time.Millisecond, Multiplier: 2, MaxDelay: 500 * time.Millisecond}

// processorFunc is a Processor of one function per message.
type processorFunc func(ctx context.Context, m *inbox.Message) error

func (f processorFunc) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = f(ctx, m)
	}
	return results
}

// recorder records received messages, in order.
type recorder struct {
	mu   sync.Mutex
	seen []inbox.Message
	fail func(m *inbox.Message) error // nil means success
}

func failWhile(on *atomic.Bool, err error) func(*inbox.Message) error {
	return func(*inbox.Message) error {
		if on.Load() {
			return err
		}
		return nil
	}
}

func (r *recorder) Process(_ context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		r.mu.Lock()
		r.seen = append(r.seen, *m)
		r.mu.Unlock()
		if r.fail != nil {
			results[i] = r.fail(m)
		}
	}
	return results
}

func (r *recorder) messages() []inbox.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]inbox.Message(nil), r.seen...)
}

func (r *recorder) await(t *testing.T, n int) []inbox.Message {
	t.Helper()
	testenv.Eventually(t, func() error {
		if got := len(r.messages()); got < n {
			return fmt.Errorf("%d of %d messages", got, n)
		}
		return nil
	})
	return r.messages()
}

// distinct waits until n different ids have arrived.
func (r *recorder) distinct(t *testing.T, n int) {
	t.Helper()
	testenv.Eventually(t, func() error {
		got := map[uuid.UUID]bool{}
		for _, m := range r.messages() {
			got[m.ID] = true
		}
		if len(got) < n {
			return fmt.Errorf("%d of %d messages", len(got), n)
		}
		return nil
	})
}

type running struct {
	*inboxamqp.Consumer
	cancel context.CancelFunc
	ended  chan error
}

// stop ends Run and waits for it to return.
func (r *running) stop(t *testing.T) {
	t.Helper()
	r.cancel()
	r.await(t)
}

// await waits until Run returns.
func (r *running) await(t *testing.T) {
	t.Helper()
	select {
	case err := <-r.ended:
		if err != nil {
			t.Errorf("Run: %v", err)
		}
		close(r.ended)
	case <-time.After(testenv.Patience):
		t.Fatal("Run does not return")
	}
}

// start runs a consumer until the test ends.
func start(t *testing.T, c *inboxamqp.Consumer) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{Consumer: c, cancel: cancel, ended: make(chan error, 1)}
	go func() { r.ended <- c.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-r.ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return r
}

// consume declares the topology and starts a consumer.
func consume(t *testing.T, b *amqptest.Broker, p inbox.Processor, cfg config) *running {
	t.Helper()
	c := newConsumer(t, b.Dial, p, cfg)
	setUp(t, c)
	r := start(t, c)
	ready(t, r)
	return r
}

func ready(t *testing.T, r *running) {
	t.Helper()
	testenv.Eventually(t, func() error { return r.Ready(t.Context()) })
}

// order returns a message in the form of our own publisher.
func order() amqp.Publishing {
	return amqp.Publishing{
		MessageId: ids.New().String(), Type: "order.placed", ContentType: "application/json",
		DeliveryMode: amqp.Persistent, Timestamp: time.Now().Truncate(time.Second), Body: []byte(`{"n":1}`),
	}
}

func awaitDepth(t *testing.T, b *amqptest.Broker, queue string, want int) {
	t.Helper()
	testenv.Eventually(t, func() error { return depthIs(t, b, queue, want) })
}

func depthIs(t *testing.T, b *amqptest.Broker, queue string, want int) error {
	t.Helper()
	if got := b.Depth(t, queue); got != want {
		return fmt.Errorf("queue %s holds %d messages, want %d", queue, got, want)
	}
	return nil
}

var errBroken = errors.New("broken")

// logBuffer records a log.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// setUp calls Setup. A busy machine may need more than the timeout of one call.
func setUp(t testing.TB, c *inboxamqp.Consumer) {
	t.Helper()
	testenv.Eventually(t, func() error { return c.Setup(t.Context()) })
}

// publishAll sends n messages of a name over one connection.
func publishAll(t *testing.T, b *amqptest.Broker, queue, name string, n int) {
	t.Helper()
	ch := b.Channel(t)
	must(t, ch.Confirm(false))
	var last *amqp.DeferredConfirmation
	for range n {
		p := order()
		p.Type = name
		var err error
		if last, err = ch.PublishWithDeferredConfirm("", queue, true, false, p); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	if ok, err := last.WaitContext(ctx); err != nil || !ok {
		t.Fatal(errors.Join(err, errors.New("not confirmed")))
	}
}

// config has all values that tests set for a consumer: its queue, its Config, the traits of its processor, and the
// values that only tests set.
type config struct {
	Queue string // Default: orders.

	Name                               string
	Concurrency, Batch, Prefetch       int
	MaxCrashes, MessageLimit           int
	HandlerTimeout, TimeLimit, Timeout time.Duration
	ShutdownTimeout                    time.Duration
	Retry                              inbox.RetryPolicy
	DeadLetterPrefix                   string
	Classes                            []string
	Bindings                           []inboxamqp.Binding
	Classic, Ordered                   bool
	Partitions                         int
	Format                             format.Format
	Logger                             *slog.Logger

	Ledger    driver.Ledger // of the processor
	Retention time.Duration // of the processor

	ConfirmTimeout time.Duration
	Leveling       time.Duration
}

func (c config) public() (inboxamqp.Queue, inbox.ConsumerConfig) {
	return inboxamqp.Queue{
			Name: cmp.Or(c.Queue, "orders"), Bindings: c.Bindings, Classic: c.Classic, Partitions: c.Partitions, Format: c.Format, Timeout: c.Timeout,
		}, inbox.ConsumerConfig{
			Name: c.Name, Concurrency: c.Concurrency, Batch: c.Batch, Prefetch: c.Prefetch, HandlerTimeout: c.HandlerTimeout,
			MaxCrashes: c.MaxCrashes, Retry: c.Retry, DeadLetterPrefix: c.DeadLetterPrefix, Classes: c.Classes,
			TimeLimit: c.TimeLimit, MessageLimit: c.MessageLimit, ShutdownTimeout: c.ShutdownTimeout,
			Logger: cmp.Or(c.Logger, slog.New(slog.DiscardHandler)), Ordered: c.Ordered,
		}
}

// remembering is a processor that claims to remember processed messages.
type remembering struct {
	inbox.Processor
	ledger    driver.Ledger
	retention time.Duration
}

func (r remembering) Ledger() driver.Ledger    { return r.ledger }
func (r remembering) Retention() time.Duration { return r.retention }

func newConsumer(t *testing.T, dial func(context.Context) (*amqp.Connection, error), p inbox.Processor, cfg config) *inboxamqp.Consumer {
	t.Helper()
	if cfg.Ledger != nil || cfg.Retention != 0 {
		p = remembering{p, cfg.Ledger, cmp.Or(cfg.Retention, driver.DefaultRetention)}
	}
	queue, consumer := cfg.public()
	c, err := inboxamqp.NewTuned(dial, queue, p, consumer,
		inboxamqp.Tuning{ConfirmTimeout: cfg.ConfirmTimeout, Leveling: cfg.Leveling})
	must(t, err)
	return c
}
