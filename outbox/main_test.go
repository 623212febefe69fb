package outbox_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// bench is a relay over the fakes, inside a synctest bubble.
type bench struct {
	*testing.T
	manager   *txretrytest.Manager
	store     *outboxtest.Store
	publisher *outboxtest.Publisher
	relay     *outbox.Relay
}

func inBubble(t *testing.T, cfg outbox.RelayConfig, fn func(b *bench)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &bench{
			T: t, manager: txretrytest.New(txretrytest.Config{}),
			store: outboxtest.New(), publisher: outboxtest.NewPublisher(),
		}
		b.over(b.store, cfg)
		fn(b)
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (b *bench) write(msgs ...outbox.Message) {
	b.Helper()
	err := b.manager.Do(b.Context(), func(ctx context.Context, tx pgx.Tx) error { return b.store.Write(ctx, tx, msgs...) })
	must(b, err)
}

func (b *bench) dead() []outbox.DeadLetter {
	b.Helper()
	letters, err := b.store.DeadLetters().List(b.Context(), outbox.Filter{})
	must(b, err)
	return letters
}

// start runs the relay until stop is called.
func (b *bench) start() (stop func()) {
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.relay.Run(ctx) }()
	return func() {
		b.Helper()
		cancel()
		if err := <-ended; err != nil {
			b.Errorf("Run returned %v", err)
		}
	}
}

func (b *bench) drain(bounds outbox.Bounds) outbox.Report {
	b.Helper()
	report, err := b.relay.Drain(b.Context(), bounds)
	must(b, err)
	return report
}

func message(key string, n int) outbox.Message {
	return outbox.Message{Name: "order.placed", Key: key, Body: []byte(strconv.Itoa(n))}
}

func bodies(msgs []driver.Message) []string {
	var out []string
	for _, m := range msgs {
		out = append(out, string(m.Body))
	}
	return out
}

func (b *bench) wantReceived(want ...string) {
	b.Helper()
	if got := bodies(b.publisher.Received()); !slices.Equal(got, want) {
		b.Errorf("received %v, want %v", got, want)
	}
}

func failure(class driver.Class) error {
	return &driver.PublishError{Class: class, Err: errors.New("scripted")}
}

func half() float64 { return 0.5 }

// logging replaces the relay with one that has a logger; text returns the log so far.
func (b *bench) logging(cfg outbox.RelayConfig) (text func() string) {
	b.Helper()
	var out syncBuffer
	cfg.Logger = slog.New(slog.NewTextHandler(&out, nil))
	b.over(b.store, cfg)
	return out.String
}

// syncBuffer is a buffer that is safe for concurrent use.
type syncBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// settled is a Source that records the settlements of a relay.
type settled struct {
	driver.Source
	mu   sync.Mutex
	all  []driver.Settlement
	body map[uuid.UUID]string
}

func (s *settled) Settle(ctx context.Context, b driver.Batch, settlements []driver.Settlement) (driver.Settled, error) {
	came, err := s.Source.Settle(ctx, b, settlements)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.body == nil {
		s.body = map[uuid.UUID]string{}
	}
	for _, m := range b.Messages {
		s.body[m.ID] = string(m.Body)
	}
	if err == nil {
		s.all = append(s.all, settlements...)
	}
	return came, err
}

// of returns the last settlement of the message with the body.
func (s *settled) of(body string) (last driver.Settlement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.all {
		if s.body[one.ID] == body {
			last = one
		}
	}
	return last
}

// wrap puts a faulty Source between the bench's relay and its store.
func (b *bench) wrap() *faulty {
	f := &faulty{Source: b.store}
	b.over(f, outbox.RelayConfig{})
	return f
}

// over replaces the bench's relay with one over another source.
func (b *bench) over(source driver.Source, cfg outbox.RelayConfig) {
	b.Helper()
	b.between(source, b.publisher, cfg)
}

// between replaces the bench's relay with one over another source and with another publisher.
func (b *bench) between(source driver.Source, p driver.Publisher, cfg outbox.RelayConfig) {
	b.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	var err error
	b.relay, err = outbox.NewRelay(source, p, cfg)
	must(b, err)
}

// faulty is a Source whose Claim and Settle return the configured errors.
type faulty struct {
	driver.Source
	mu            sync.Mutex
	claim, settle error
	once          bool // Claim fails only once
	held          bool // a failing Claim leases its lanes
}

func (f *faulty) set(claim, settle error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.claim, f.settle = claim, settle
}

func (f *faulty) errors() (claim, settle error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.claim, f.settle
}

func (f *faulty) Claim(ctx context.Context, r driver.Claim) (driver.Batch, error) {
	if err, _ := f.errors(); err != nil {
		if f.once {
			f.set(nil, nil)
		}
		if f.held {
			_, _ = f.Source.Claim(ctx, r)
		}
		return driver.Batch{}, err
	}
	return f.Source.Claim(ctx, r)
}

func (f *faulty) Settle(ctx context.Context, b driver.Batch, o []driver.Settlement) (driver.Settled, error) {
	if _, err := f.errors(); err != nil {
		return driver.Settled{}, err
	}
	return f.Source.Settle(ctx, b, o)
}

// silent never confirms, like a stopped broker.
type silent struct{}

func (silent) Publish(ctx context.Context, _ driver.Message, done func(error)) {
	context.AfterFunc(ctx, func() { done(failure(driver.Unavailable)) })
}
