package engine_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

var errBroken = errors.New("broken")

var quick = inbox.RetryPolicy{MaxAttempts: 3, BaseDelay: 100 * time.Millisecond, MaxDelay: 200 * time.Millisecond}

// recorder is a processor that records its messages, and fails as configured.
type recorder struct {
	mu    sync.Mutex
	seen  []inbox.Message
	sizes []int
	fail  func(ctx context.Context, m *inbox.Message) error
}

func (r *recorder) Process(ctx context.Context, msgs []*inbox.Message) []error {
	r.mu.Lock()
	for _, m := range msgs {
		r.seen = append(r.seen, *m)
	}
	r.sizes = append(r.sizes, len(msgs))
	r.mu.Unlock()
	results := make([]error, len(msgs))
	for i, m := range msgs {
		if r.fail != nil {
			results[i] = r.fail(ctx, m)
		}
	}
	return results
}

func (r *recorder) messages() []inbox.Message {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]inbox.Message(nil), r.seen...)
}

// withLedger is a processor that keeps a ledger.
type withLedger struct {
	inbox.Processor
	ledger driver.Ledger
}

func (p withLedger) Ledger() driver.Ledger    { return p.ledger }
func (p withLedger) Retention() time.Duration { return driver.DefaultRetention }

// bench is a consumer of a queue in memory.
type bench struct {
	t        *testing.T
	broker   *memqueue.Broker
	queue    *memqueue.Queue
	source   *memqueue.Source
	consumer *engine.Consumer
	cancel   context.CancelFunc
	ended    chan error
}

func newBench(t *testing.T, p inbox.Processor, cfg engine.Config, o memqueue.Options) *bench {
	t.Helper()
	b := &bench{t: t, broker: memqueue.NewBroker()}
	b.queue = b.broker.Queue("orders", cfg.Classes...)
	b.source = b.queue.Source(o)
	b.consumer = newConsumer(t, b.source, p, cfg)
	return b
}

func newConsumer(t *testing.T, s driver.Source, p inbox.Processor, cfg engine.Config) *engine.Consumer {
	t.Helper()
	cfg.Queue, cfg.Package = "orders", "inboxtest"
	if cfg.Retry == (inbox.RetryPolicy{}) {
		cfg.Retry = quick
	}
	if cfg.Logger == nil {
		out := io.Discard
		if os.Getenv("ENGINE_LOG") != "" {
			out = os.Stdout
		}
		cfg.Logger = slog.New(slog.NewTextHandler(out, nil))
	}
	c, err := engine.New(s, p, cfg)
	noError(t, err)
	return c
}

func (b *bench) start() {
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel, b.ended = cancel, make(chan error, 1)
	over := make(chan struct{})
	go func() {
		defer close(over)
		b.ended <- b.consumer.Run(ctx)
	}()
	b.t.Cleanup(func() { // even if the test fails
		cancel()
		<-over
	})
}

// stop ends the consumer and returns how long that took.
func (b *bench) stop() time.Duration {
	b.t.Helper()
	began := time.Now()
	b.cancel()
	if err := <-b.ended; err != nil {
		b.t.Errorf("Run = %v", err)
	}
	return time.Since(began)
}

func (b *bench) put(name string, n int) (all []uuid.UUID) {
	b.t.Helper()
	for range n {
		m := &inbox.Message{ID: ids.New(), Name: name, Body: []byte("{}")}
		noError(b.t, b.queue.Put(m))
		all = append(all, m.ID)
	}
	return all
}

// idle waits until the queue has nothing left.
func (b *bench) idle() {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 24*time.Hour)
	defer cancel()
	noError(b.t, b.broker.Idle(ctx))
}

// letters returns the dead letters of a class.
func (b *bench) letters(class string) (all []inbox.DeadLetter) {
	b.t.Helper()
	err := b.source.DeadLetters().Scan(context.Background(), class, func(d *inbox.DeadLetter) (driver.Outcome, error) {
		all = append(all, *d)
		return driver.Keep, nil
	}, func(inbox.DeadLetter, error) {})
	noError(b.t, err)
	return all
}

// eventually waits in a bubble until a condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for range 36_000 {
		synctest.Wait()
		if holds() {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal("not within an hour: " + what)
}

func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, test)
}

func ready(b *bench) error { return b.consumer.Ready(context.Background()) }

func noError(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}
