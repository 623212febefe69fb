package inboxtest_test

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	outboxdriver "github.com/holdfast-go/holdfast/outbox/driver"
)

// A message that was lost before or after it was processed is redelivered, and each delivery has a copy of
// its own.
func TestConsumer_redeliversLostMessages(t *testing.T) {
	t.Parallel()
	var deliveries []bool
	lost := map[inboxtest.Step]bool{}
	cfg := config{Fault: func(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
		if (at == inboxtest.AtReceive || at == inboxtest.AtAck) && !lost[at] {
			lost[at] = true
			return inboxtest.Lose
		}
		return inboxtest.OK
	}}
	p := processor(func(_ context.Context, m *inbox.Message) error {
		deliveries = append(deliveries, m.Redelivered)
		m.Body[0] = 'x' // changes only this delivery
		if string(m.Body) != "x}" || m.Attempt != 1 {
			t.Errorf("message = %+v", m)
		}
		return nil
	})
	bubble(t, p, cfg, func(t *testing.T, b rig, _ func()) {
		publish(t, b, "a")
		idle(t, b)
		if want := []bool{true, true}; !slices.Equal(deliveries, want) { // the first attempt to publish reached no queue
			t.Errorf("redelivered = %v, want %v", deliveries, want)
		}
	})
}

func TestDeliverTwice(t *testing.T) {
	t.Parallel()
	var trail []string
	p := processor(func(_ context.Context, m *inbox.Message) error {
		trail = append(trail, fmt.Sprint(m.Attempt, m.Redelivered))
		if m.Attempt == 1 {
			return errors.New("boom")
		}
		return nil
	})
	bubble(t, p, config{Fault: inboxtest.DeliverTwice}, func(t *testing.T, b rig, _ func()) {
		publish(t, b, "a")
		idle(t, b)
		if want := []string{"1 false", "2 false", "2 true"}; !slices.Equal(trail, want) {
			t.Errorf("deliveries %v, want %v", trail, want)
		}
	})
}

// One step of any kind may fail once, in any way: the message is still processed, and the consumer becomes
// ready again.
func TestFaults(t *testing.T) {
	t.Parallel()
	for step := inboxtest.AtOpen; step <= inboxtest.AtClose; step++ {
		for what := inboxtest.FailBefore; what <= inboxtest.Refuse; what++ {
			t.Run(fmt.Sprintf("step %s outcome %d", step, what), func(t *testing.T) {
				t.Parallel()
				var asked atomic.Int64
				cfg := config{Fault: func(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
					if at != step || asked.Add(1) > 1 {
						return inboxtest.OK
					}
					return what
				}}
				done := map[string]int{}
				var up atomic.Bool
				p := processor(func(_ context.Context, m *inbox.Message) error {
					switch {
					case m.Name == "retried" && m.Attempt == 1:
						return errors.New("boom")
					case !up.Load():
						return inbox.Unavailable(errors.New("down")) // so that the session is stopped, and messages are requeued
					}
					done[m.Name]++
					return nil
				})
				bubble(t, p, cfg, func(t *testing.T, b rig, _ func()) {
					publish(t, b, "retried", "event", "event", "event")
					time.Sleep(time.Minute)
					up.Store(true)
					idle(t, b)
					if done["retried"] == 0 || done["event"] < 3 || len(letters(t, b, inbox.Filter{})) != 0 {
						t.Errorf("processed %v", done)
					}
					time.Sleep(time.Minute)
					if err := b.Ready(t.Context()); err != nil {
						t.Errorf("Ready = %v", err)
					}
				})
				if asked.Load() == 0 {
					t.Error("Fault was never called for the step")
				}
			})
		}
	}
}

func TestNewConsumer_rejectsBadConfig(t *testing.T) {
	t.Parallel()
	_, err := inboxtest.NewConsumer(nil, inboxtest.Queue{Name: ""}, nil, inbox.ConsumerConfig{
		Concurrency: -1, ShutdownTimeout: -1, Retry: inbox.RetryPolicy{BaseDelay: -1},
	})
	for _, part := range []string{"Broker", "queue", "processor", "ConsumerConfig.Concurrency", "ConsumerConfig.ShutdownTimeout", "RetryPolicy.BaseDelay"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%s is not named in %v", part, err)
		}
	}
	if err := newRig(t, inbox.NewMux(), config{}).Send(t.Context(), nil); err == nil {
		t.Error("a nil message was sent")
	}
}

var _ outboxdriver.Publisher = (*inboxtest.Broker)(nil)

func TestNames(t *testing.T) {
	t.Parallel()
	for pattern, names := range map[string]map[string]bool{
		"":             {"": true, "a": true, "order.placed": true}, // no pattern
		"order.placed": {"order.placed": true, "order.placed.v2": false, "order": false},
		"order.*":      {"order.placed": true, "order": false, "order.a.b": false, "user.a": false},
		"order.#":      {"order.placed": true, "order": true, "order.a.b": true, "orders.a": false},
		"#.placed":     {"order.placed": true, "placed": true, "a.b.placed": true, "placed.a": false},
		"*.placed.#":   {"order.placed": true, "order.placed.v2": true, "placed": false},
	} {
		cfg := config{}
		if pattern != "" {
			cfg.Names = []string{pattern}
		}
		b := newRig(t, inbox.NewMux(), cfg)
		for name, want := range names {
			m := &inbox.Message{ID: ids.New(), Name: name}
			if err := b.Send(t.Context(), m); (err == nil) != want {
				t.Errorf("%q to a queue for %q: %v", name, pattern, err)
			}
		}
	}
}

// A relay's message arrives in each matching queue, in the consumer's form; without a queue it is unroutable.
func TestPublish(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		broker := inboxtest.NewBroker()
		var got [2][]*inbox.Message
		ctx, stop := context.WithCancel(t.Context())
		defer synctest.Wait()
		defer stop()
		for i, queue := range []string{"billing", "mail"} {
			p := processor(func(_ context.Context, m *inbox.Message) error { got[i] = append(got[i], m); return nil })
			c, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: queue, Names: []string{"order.*"}}, p, inbox.ConsumerConfig{})
			noError(t, err)
			go func() { _ = c.Run(ctx) }()
		}
		created := time.Now()
		publish := func(ctx context.Context, name string) (err error) {
			broker.Publish(ctx, outboxdriver.Message{
				ID: uuid.Must(uuid.NewV7()), Name: name, Body: []byte("{}"), ContentType: "application/json",
				Headers: map[string]string{"a": "b"}, CreatedAt: created, Key: "customer-7",
			}, func(e error) { err = e })
			return err
		}
		noError(t, publish(t.Context(), "order.placed"))
		noError(t, broker.Idle(t.Context()))
		for i, queue := range []string{"billing", "mail"} {
			if len(got[i]) != 1 {
				t.Fatalf("%s got %d messages", queue, len(got[i]))
			}
			if m := got[i][0]; m.Queue != queue || m.Name != "order.placed" || string(m.Body) != "{}" || m.Headers["a"] != "b" ||
				m.ContentType != "application/json" || !m.PublishedAt.Equal(created) || m.Attempt != 1 || m.Key != "customer-7" {
				t.Errorf("%s got %+v", queue, m)
			}
		}
		if err := publish(t.Context(), "user.left"); outboxdriver.ClassOf(err) != outboxdriver.Unroutable {
			t.Errorf("without a queue: %v", err)
		}
		for name, err := range map[string]error{
			"large body": send(t, broker, &inbox.Message{Name: "order.placed", Body: make([]byte, 16<<20+1)}),
			"long name":  send(t, broker, &inbox.Message{Name: "order." + strings.Repeat("x", 250)}),
			"headers":    send(t, broker, &inbox.Message{Name: "order.placed", Headers: map[string]string{"a": strings.Repeat("x", 130<<10)}}),
		} {
			if err == nil {
				t.Errorf("%s: taken", name)
			}
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if err := publish(ended, "order.placed"); outboxdriver.ClassOf(err) != outboxdriver.Unavailable || !errors.Is(err, context.Canceled) {
			t.Errorf("with a context that has ended: %v", err)
		}
	})
}

func send(t *testing.T, b *inboxtest.Broker, m *inbox.Message) error {
	t.Helper()
	return b.Send(t.Context(), m)
}

// The shutdown budget is 60 seconds by default, for handlers and settling together.
func TestShutdownTimeout(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		cfg            inbox.ConsumerConfig
		deaf           bool // ignores the end of its context
		hangs          inboxtest.Step
		handler, whole time.Duration
	}{
		"default":                   {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, false, 0, 54 * time.Second, 54 * time.Second},
		"default, deaf handler":     {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, true, 0, 54 * time.Second, 57 * time.Second},
		"default, session hangs":    {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, true, inboxtest.AtClose, 54 * time.Second, 60 * time.Second},
		"default, giving back":      {inbox.ConsumerConfig{HandlerTimeout: time.Hour}, false, inboxtest.AtGiveBack, 54 * time.Second, 60 * time.Second},
		"own":                       {inbox.ConsumerConfig{HandlerTimeout: time.Hour, ShutdownTimeout: 10 * time.Second}, false, 0, 9 * time.Second, 9 * time.Second},
		"own, session hangs":        {inbox.ConsumerConfig{HandlerTimeout: time.Hour, ShutdownTimeout: 10 * time.Second}, true, inboxtest.AtClose, 9 * time.Second, 10 * time.Second},
		"default of HandlerTimeout": {inbox.ConsumerConfig{ShutdownTimeout: time.Hour}, false, 0, 60 * time.Second, 60 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var stopped, ended time.Time
			var cause error
			p := processor(func(ctx context.Context, _ *inbox.Message) error {
				<-ctx.Done()
				ended, cause = time.Now(), context.Cause(ctx)
				if tt.deaf {
					time.Sleep(time.Hour)
				}
				return cause
			})
			cfg := config{ConsumerConfig: tt.cfg, Fault: func(at inboxtest.Step, _ *inbox.Message) inboxtest.Outcome {
				if at == tt.hangs {
					return inboxtest.Hang
				}
				return inboxtest.OK
			}}
			bubble(t, p, cfg, func(t *testing.T, b rig, stop func()) {
				publish(t, b, "a")
				synctest.Wait()
				stopped = time.Now()
				stop()
				whole := time.Since(stopped)
				synctest.Wait() // the handler may be abandoned
				if handler := ended.Sub(stopped); whole != tt.whole || handler != tt.handler {
					t.Errorf("ended after %v, the handler's context after %v; want %v and %v", whole, handler, tt.whole, tt.handler)
				}
				if draining := errors.Is(cause, inbox.ErrDraining); draining == (tt.cfg.HandlerTimeout == 0) {
					t.Errorf("the context ended with %v", cause)
				}
				time.Sleep(2 * time.Hour) // for abandoned handlers
			})
		})
	}
}

func TestConsumer(t *testing.T) {
	t.Parallel()
	for name, ordered := range map[string]bool{"shared": false, "ordered": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conformance.TestConsumer(t, conformance.ConsumerBackend{
				Runs: conformance.Runs{Bubble: true}, Ordered: ordered, New: func(*testing.T) conformance.ConsumerFixture { return newFixture(ordered) },
			})
		})
	}
}

// network breaks the calls of the consumers of one queue.
type network struct {
	queue   *memqueue.Queue
	outcome atomic.Int64
}

func (n *network) CutConnections() { n.queue.Cut() }
func (n *network) Pause()          { n.outcome.Store(int64(inboxtest.Hang)) }
func (n *network) DropReplies()    { n.outcome.Store(int64(inboxtest.FailAfter)) }
func (n *network) Heal()           { n.outcome.Store(int64(inboxtest.OK)) }

func newFixture(ordered bool) conformance.ConsumerFixture {
	broker := inboxtest.NewBroker()
	queue := broker.Queue("orders", conformance.OwnClass)
	source := func(*testing.T) driver.Source { return queue.Source(memqueue.Options{Exclusive: ordered}) }
	n := &network{queue: queue}
	return conformance.ConsumerFixture{
		SourceFixture: conformance.SourceFixture{
			New:         source,
			DeadLetters: func(*testing.T) driver.DeadLetters { return queue.Source(memqueue.Options{}).DeadLetters() },
			Publish: func(t *testing.T, msgs ...*inbox.Message) {
				for _, m := range msgs {
					noError(t, queue.Put(m))
				}
			},
			Network: n,
			Delete: func(*testing.T) func() {
				queue.Delete()
				return queue.Declare
			},
			Refuse: func(_ *testing.T, class string) func() {
				queue.Refuse(class, true)
				return func() { queue.Refuse(class, false) }
			},
		},
		Consumer: func(t *testing.T, p inbox.Processor, cfg conformance.ConsumerConfig) conformance.Consumer {
			cfg.Name = cmp.Or(cfg.Name, "suite")
			c, err := inboxtest.NewConsumerOf(broker, inboxtest.Queue{
				Name:  "orders",
				Fault: func(inboxtest.Step, *inbox.Message) inboxtest.Outcome { return inboxtest.Outcome(n.outcome.Load()) },
			}, p, cfg.ConsumerConfig, cfg.MaxBodyBytes)
			noError(t, err)
			return c
		},
	}
}

type processor func(ctx context.Context, m *inbox.Message) error

func (p processor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	results := make([]error, len(msgs))
	for i, m := range msgs {
		results[i] = p(ctx, m)
	}
	return results
}

// config is the part of a consumer's config that tests set.
type config struct {
	inbox.ConsumerConfig
	Names []string
	Fault func(at inboxtest.Step, m *inbox.Message) inboxtest.Outcome
}

// rig is a broker with one queue and its consumer.
type rig struct {
	*inboxtest.Broker
	*inboxtest.Consumer
}

func newRig(t *testing.T, p inbox.Processor, cfg config) rig {
	t.Helper()
	b := inboxtest.NewBroker()
	c, err := inboxtest.NewConsumer(b, inboxtest.Queue{Name: "inbox", Names: cfg.Names, Fault: cfg.Fault}, p, cfg.ConsumerConfig)
	noError(t, err)
	return rig{b, c}
}

// bubble runs a test with a running consumer; stop ends its Run and waits for it.
func bubble(t *testing.T, p processor, cfg config, test func(t *testing.T, b rig, stop func())) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		cfg.Concurrency = cmp.Or(cfg.Concurrency, 1)
		cfg.Rand = func() float64 { return 0.5 }
		cfg.Logger = slog.New(slog.DiscardHandler)
		b := newRig(t, p, cfg)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			if err := b.Run(ctx); err != nil {
				t.Errorf("Run: %v", err)
			}
		}()
		stop := func() {
			cancel()
			<-ended
		}
		defer stop()
		synctest.Wait()
		test(t, b, stop)
	})
}

func publish(t *testing.T, b rig, names ...string) (published []uuid.UUID) {
	t.Helper()
	for _, name := range names {
		// With the bubble's time: ids.New never returns an earlier time than it returned outside the bubble.
		id := ids.Deterministic(time.Now(), rand.Text())
		m := &inbox.Message{ID: id, Name: name, Body: []byte(`{}`), Attempt: 7, Queue: "elsewhere"}
		noError(t, b.Send(t.Context(), m))
		published = append(published, m.ID)
	}
	return published
}

func idle(t *testing.T, b rig) {
	t.Helper()
	noError(t, b.Idle(t.Context()))
}

func letters(t *testing.T, b rig, f inbox.Filter) []inbox.DeadLetter {
	t.Helper()
	found, err := b.DeadLetters().List(t.Context(), f)
	noError(t, err)
	return found
}

func noError(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }
