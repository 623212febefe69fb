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
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// bench is a relay over the fakes, inside a bubble.
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

func TestRunPublishesOnWake(t *testing.T) {
	inBubble(t, outbox.RelayConfig{PollInterval: time.Hour}, func(b *bench) {
		defer b.start()()
		synctest.Wait()
		begin := time.Now()
		b.write(message("k", 1))
		b.relay.Wake()
		synctest.Wait()
		b.wantReceived("1")
		if took := time.Since(begin); took != 0 {
			b.Errorf("it took %v", took)
		}
		if err := b.relay.Ready(b.Context()); err != nil {
			b.Errorf("Ready: %v", err)
		}
	})
}

func TestKeyKeepsOneInFlight(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.publisher.Latency(10 * time.Millisecond)
		b.write(message("k", 1), message("k", 2), message("k", 3))
		for n := 4; n < 100; n++ {
			b.write(message("", n))
		}
		begin := time.Now()
		b.drain(outbox.Bounds{})
		// Three in turn at most; the unkeyed ones are in flight beside them. The lanes are claimed
		// four at a time.
		if took := time.Since(begin); took > 60*time.Millisecond {
			b.Errorf("it took %v: the messages went one by one", took)
		}
		var keyed []string
		for _, m := range b.publisher.Received() {
			if m.Key == "k" {
				keyed = append(keyed, string(m.Body))
			}
		}
		if !slices.Equal(keyed, []string{"1", "2", "3"}) {
			b.Errorf("key arrived as %v", keyed)
		}
	})
}

// Messages of one key that take longer than PublishTimeout, one by one, say nothing against the
// broker.
func TestLongKeyIsNoOutage(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		text := b.logging(outbox.RelayConfig{})
		b.publisher.Latency(30 * time.Millisecond)
		const n = 1000
		var msgs []outbox.Message
		for i := range n {
			msgs = append(msgs, message("k", i))
		}
		b.write(msgs...)
		b.drain(outbox.Bounds{})
		if got := len(b.publisher.Received()); got != n || strings.Contains(text(), "paused") {
			b.Errorf("%d of %d were sent: %s", got, n, text())
		}
	})
}

// logging makes the relay anew with a logger, and returns what it has written so far.
func (b *bench) logging(cfg outbox.RelayConfig) (text func() string) {
	b.Helper()
	var out syncBuffer
	cfg.Logger = slog.New(slog.NewTextHandler(&out, nil))
	b.over(b.store, cfg)
	return out.String
}

// syncBuffer is a buffer for several goroutines.
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

// settled is a Source that notes what a relay has settled.
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

func half() float64 { return 0.5 }

func TestShutdownSettlesWhatIsInFlight(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.publisher.Latency(2 * time.Second)
		b.write(message("k", 1), message("k", 2))
		stop := b.start()
		time.Sleep(time.Second)
		begin := time.Now()
		stop()
		if took := time.Since(begin); took != time.Second {
			b.Errorf("the shutdown took %v", took)
		}
		b.wantReceived("1")
		if left := bodies(b.store.Pending()); !slices.Equal(left, []string{"2"}) {
			b.Errorf("left %v", left)
		}
		batch, err := b.store.Claim(b.Context(), driver.Claim{Limit: 1, Lease: time.Second})
		if err != nil || len(batch.Messages) != 1 {
			b.Errorf("the rest was not given back: %v, %v", batch, err)
		}
	})
}

func TestShutdownIsBounded(t *testing.T) {
	inBubble(t, outbox.RelayConfig{PublishTimeout: time.Minute}, func(b *bench) {
		b.publisher.Latency(time.Hour)
		b.write(message("k", 1))
		stop := b.start()
		synctest.Wait()
		begin := time.Now()
		stop()
		if took := time.Since(begin); took > 15*time.Second {
			b.Errorf("the shutdown took %v", took)
		}
	})
}

func TestNewRelayRefuses(t *testing.T) {
	t.Parallel()
	good := outboxtest.NewPublisher()
	for name, make := range map[string]func() (*outbox.Relay, error){
		"no source": func() (*outbox.Relay, error) { return outbox.NewRelay(nil, good, outbox.RelayConfig{}) },
		"no publisher": func() (*outbox.Relay, error) {
			return outbox.NewRelay(outboxtest.New(), nil, outbox.RelayConfig{})
		},
		"nil transport": func() (*outbox.Relay, error) {
			return outbox.NewRelay(outboxtest.New(), good, outbox.RelayConfig{Transports: map[string]driver.Publisher{"audit": nil}})
		},
		"two default transports": func() (*outbox.Relay, error) {
			return outbox.NewRelay(outboxtest.New(), good, outbox.RelayConfig{Transports: map[string]driver.Publisher{"": good}})
		},
		"lease": func() (*outbox.Relay, error) {
			return outbox.NewRelay(outboxtest.New(), good, outbox.RelayConfig{LeaseTTL: -time.Second})
		},
		"batch": func() (*outbox.Relay, error) {
			return outbox.NewRelay(outboxtest.New(), good, outbox.RelayConfig{BatchSize: -1})
		},
	} {
		if r, err := make(); err == nil || r != nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
