package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
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
			T: t, manager: txretrytest.NewManager(txretrytest.Config{}),
			store: outboxtest.NewStore(), publisher: outboxtest.NewPublisher(),
		}
		cfg.Logger = slog.New(slog.DiscardHandler)
		var err error
		if b.relay, err = outbox.NewRelay(b.store, outbox.Transports{"": b.publisher}, cfg); err != nil {
			t.Fatal(err)
		}
		fn(b)
	})
}

func (b *bench) write(msgs ...outbox.Message) {
	b.Helper()
	err := b.manager.Do(b.Context(), func(ctx context.Context, tx pgx.Tx) error { return b.store.Write(ctx, tx, msgs...) })
	if err != nil {
		b.Fatal(err)
	}
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
	if err != nil {
		b.Fatal(err)
	}
	return report
}

func message(key string, n int) outbox.Message {
	return outbox.Message{Name: "order.placed", Key: key, Body: []byte(strconv.Itoa(n))}
}

func bodies(msgs []outbox.Message) []string {
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

func failure(class outbox.Class) error {
	return &outbox.PublishError{Class: class, Err: errors.New("scripted")}
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

func TestRunPollsWithoutWake(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		defer b.start()()
		synctest.Wait()
		b.write(message("k", 1))
		time.Sleep(time.Second + time.Millisecond)
		synctest.Wait()
		b.wantReceived("1")
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
		// Three in turn at most; the unkeyed ones are in flight beside them. The lanes are claimed four at a time.
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

func TestFailureHoldsBackItsKeyOnly(t *testing.T) {
	inBubble(t, outbox.RelayConfig{Rand: half}, func(b *bench) {
		failed := false
		b.publisher.Respond(func(m outbox.Message) error {
			if string(m.Body) == "1" && !failed {
				failed = true
				return errors.New("not now")
			}
			return nil
		})
		b.write(message("k", 1), message("k", 2), message("j", 3), message("k", 4))
		report := b.drain(outbox.Bounds{})
		b.wantReceived("3")
		if report != (outbox.Report{Published: 1, Failed: 1}) || report.ExitCode() != 1 {
			b.Errorf("report %+v", report)
		}
		if left := b.store.List(); left[0].Attempts != 1 || left[1].Attempts != 0 {
			b.Errorf("attempts %d and %d", left[0].Attempts, left[1].Attempts)
		}
		time.Sleep(time.Second)
		report = b.drain(outbox.Bounds{})
		b.wantReceived("3", "1", "2", "4")
		if report.ExitCode() != 0 {
			b.Errorf("report %+v", report)
		}
	})
}

func half() float64 { return 0.5 }

func TestClassesDecideTheAttempts(t *testing.T) {
	for _, tc := range []struct {
		class    outbox.Class
		cfg      outbox.RelayConfig
		attempts int
	}{
		{outbox.Retryable, outbox.RelayConfig{}, 10},
		{outbox.Unroutable, outbox.RelayConfig{MaxAttempts: 3}, 3},
		{outbox.Permanent, outbox.RelayConfig{}, 1},
		{outbox.Permanent, outbox.RelayConfig{MaxAttemptsByClass: map[outbox.Class]int{outbox.Permanent: 2}}, 2},
		{"nonsense", outbox.RelayConfig{MaxAttempts: 2}, 2},
	} {
		t.Run(fmt.Sprintf("%s_%d", tc.class, tc.attempts), func(t *testing.T) {
			tc.cfg.MaxRetryDelay = time.Minute
			inBubble(t, tc.cfg, func(b *bench) {
				calls := 0
				b.publisher.Respond(func(outbox.Message) error { calls++; return failure(tc.class) })
				b.write(message("k", 1))
				report := b.drain(outbox.Bounds{TimeLimit: time.Hour})
				dead := b.store.DeadLetters()
				if calls != tc.attempts || report.Failed != tc.attempts || report.Dead != 1 || len(dead) != 1 {
					b.Fatalf("%d calls, report %+v, %d dead letters", calls, report, len(dead))
				}
				if dead[0].Attempts != tc.attempts || dead[0].Class != outbox.ClassOf(failure(tc.class)) || dead[0].Err == "" {
					b.Errorf("dead letter %+v", dead[0])
				}
			})
		})
	}
}

func TestUnavailableCostsNothingAndResumes(t *testing.T) {
	for _, class := range []outbox.Class{outbox.Unavailable, outbox.Blocked} {
		t.Run(string(class), func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{}, func(b *bench) {
				b.publisher.Respond(func(outbox.Message) error { return failure(class) })
				for n := range 50 {
					b.write(message("k"+strconv.Itoa(n%5), n))
				}
				defer b.start()()
				time.Sleep(10 * time.Minute)
				if b.relay.Ready(b.Context()) == nil {
					b.Error("Ready while the only transport is down")
				}
				for _, m := range b.store.List() {
					if m.Attempts != 0 {
						b.Fatalf("an outage cost %d attempts", m.Attempts)
					}
				}
				b.publisher.Respond(nil)
				time.Sleep(23 * time.Second) // the longest pause
				synctest.Wait()
				if n := len(b.publisher.Received()); n != 50 {
					b.Errorf("%d of 50 arrived", n)
				}
				if err := b.relay.Ready(b.Context()); err != nil {
					b.Errorf("Ready: %v", err)
				}
			})
		})
	}
}

func TestOneTransportDownLeavesTheOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		manager, store := txretrytest.NewManager(txretrytest.Config{}), outboxtest.NewStore()
		good, bad := outboxtest.NewPublisher(), outboxtest.NewPublisher()
		bad.Respond(func(outbox.Message) error { return failure(outbox.Unavailable) })
		relay, err := outbox.NewRelay(store, outbox.Transports{"": good, "other": bad},
			outbox.RelayConfig{BatchSize: 2, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		for n := range 20 {
			m := message("", n)
			if n < 10 {
				m.Transport = "other"
			}
			if err := manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) }); err != nil {
				t.Fatal(err)
			}
		}
		report, err := relay.Drain(t.Context(), outbox.Bounds{})
		if report.Published != 10 || report.Failed != 0 {
			t.Errorf("report %+v", report)
		}
		if outbox.ClassOf(err) != outbox.Unavailable {
			t.Errorf("Drain says %v, want that a transport is unavailable", err)
		}
	})
}

func TestUnknownTransportBecomesDeadLetter(t *testing.T) {
	inBubble(t, outbox.RelayConfig{MaxAttempts: 2}, func(b *bench) {
		m := message("", 1)
		m.Transport = "nowhere"
		b.write(m, message("", 2))
		b.drain(outbox.Bounds{TimeLimit: time.Minute})
		b.wantReceived("2")
		if dead := b.store.DeadLetters(); len(dead) != 1 || dead[0].Err != `outbox: publish: retryable: the relay has no transport "nowhere"` {
			b.Errorf("dead letters %+v", dead)
		}
	})
}

func TestPanicIsAFailure(t *testing.T) {
	inBubble(t, outbox.RelayConfig{MaxAttempts: 1}, func(b *bench) {
		b.publisher.Respond(func(m outbox.Message) error {
			if string(m.Body) == "1" {
				panic("boom")
			}
			return nil
		})
		b.write(message("k", 1), message("k", 2))
		b.drain(outbox.Bounds{})
		b.wantReceived("2")
		if len(b.store.DeadLetters()) != 1 {
			b.Error("no dead letter")
		}
	})
}

// silent never confirms, as a broker that is stopped.
type silent struct{}

func (silent) Publish(ctx context.Context, _ outbox.Message, done func(error)) {
	context.AfterFunc(ctx, func() { done(failure(outbox.Unavailable)) })
}

func TestNoConfirmIsUnavailable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		manager, store := txretrytest.NewManager(txretrytest.Config{}), outboxtest.NewStore()
		relay, err := outbox.NewRelay(store, outbox.Transports{"": silent{}}, outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if err := manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, message("k", 1)) }); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if _, err := relay.Drain(t.Context(), outbox.Bounds{}); outbox.ClassOf(err) != outbox.Unavailable {
			t.Errorf("Drain: %v", err)
		}
		if took := time.Since(begin); took != 10*time.Second {
			t.Errorf("it took %v, want PublishTimeout", took)
		}
		if left := store.List(); len(left) != 1 || left[0].Attempts != 0 {
			t.Errorf("left %+v", left)
		}
	})
}

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
		if left := bodies(b.store.List()); !slices.Equal(left, []string{"2"}) {
			b.Errorf("left %v", left)
		}
		batch, err := b.store.Claim(b.Context(), outbox.ClaimRequest{Limit: 1, Lease: time.Second})
		if err != nil || len(batch.Messages) != 1 {
			b.Errorf("the rest was not given back: %v, %v", batch, err)
		}
	})
}

func TestShutdownIsBounded(t *testing.T) {
	inBubble(t, outbox.RelayConfig{PublishTimeout: time.Minute, LeaseTTL: 2 * time.Minute}, func(b *bench) {
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

// faulty is a Source that fails while told to.
type faulty struct {
	outbox.Source
	mu            sync.Mutex
	claim, settle error
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

func (f *faulty) Claim(ctx context.Context, r outbox.ClaimRequest) (outbox.Batch, error) {
	if err, _ := f.errors(); err != nil {
		return outbox.Batch{}, err
	}
	return f.Source.Claim(ctx, r)
}

func (f *faulty) Settle(ctx context.Context, b outbox.Batch, o []outbox.Outcome) ([]outbox.Lease, error) {
	if _, err := f.errors(); err != nil {
		return nil, err
	}
	return f.Source.Settle(ctx, b, o)
}

func TestStoreFaults(t *testing.T) {
	down := errors.New("connection refused")
	t.Run("claim", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.set(down, nil)
			b.write(message("k", 1))
			if _, err := b.relay.Drain(b.Context(), outbox.Bounds{}); !errors.Is(err, down) {
				b.Errorf("Drain: %v", err)
			}
			defer b.start()()
			time.Sleep(time.Minute)
			if b.relay.Ready(b.Context()) == nil {
				b.Error("Ready while the store is down")
			}
			f.set(nil, nil)
			time.Sleep(time.Minute)
			synctest.Wait()
			b.wantReceived("1")
		})
	})
	t.Run("settle", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.set(nil, down)
			b.write(message("k", 1), message("k", 2))
			defer b.start()()
			time.Sleep(10 * time.Second)
			f.set(nil, nil)
			time.Sleep(time.Minute)
			synctest.Wait()
			b.wantReceived("1", "2") // settled late, but not published twice
		})
	})
	t.Run("settle too late", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			f := b.wrap()
			f.set(nil, down)
			b.write(message("k", 1), message("k", 2))
			defer b.start()()
			time.Sleep(40 * time.Second)
			f.set(nil, nil)
			time.Sleep(time.Minute)
			synctest.Wait()
			got := bodies(b.publisher.Received())
			if len(got) < 4 || !slices.Equal(got[:4], []string{"1", "2", "1", "2"}) || len(b.store.List()) != 0 {
				b.Errorf("received %v, left %d", got, len(b.store.List()))
			}
		})
	})
}

// wrap puts a faulty Source before the bench's store.
func (b *bench) wrap() *faulty {
	f := &faulty{Source: b.store}
	var err error
	b.relay, err = outbox.NewRelay(f, outbox.Transports{"": b.publisher}, outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	return f
}

func TestDrainBounds(t *testing.T) {
	t.Run("limit", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{BatchSize: 3}, func(b *bench) {
			for n := range 20 {
				b.write(message("", n))
			}
			if report := b.drain(outbox.Bounds{Limit: 7}); report.Published != 7 || len(b.publisher.Received()) != 7 {
				b.Errorf("report %+v, received %d", report, len(b.publisher.Received()))
			}
		})
	})
	t.Run("default limit", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			var msgs []outbox.Message
			for n := range 1100 {
				msgs = append(msgs, message("", n))
			}
			b.write(msgs...)
			if report := b.drain(outbox.Bounds{}); report.Published != 1000 {
				b.Errorf("report %+v", report)
			}
		})
	})
	t.Run("time limit waits for more", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			begin := time.Now()
			go func() {
				time.Sleep(30 * time.Second)
				b.write(message("", 1))
			}()
			report := b.drain(outbox.Bounds{TimeLimit: 55 * time.Second})
			if took := time.Since(begin); report.Published != 1 || took != 55*time.Second {
				b.Errorf("report %+v after %v", report, took)
			}
		})
	})
	t.Run("negative", func(t *testing.T) {
		inBubble(t, outbox.RelayConfig{}, func(b *bench) {
			if _, err := b.relay.Drain(b.Context(), outbox.Bounds{Limit: -1}); err == nil {
				b.Error("accepted")
			}
		})
	})
}

func TestNewRelayRefuses(t *testing.T) {
	t.Parallel()
	good := outbox.Transports{"": outboxtest.NewPublisher()}
	for name, make := range map[string]func() (*outbox.Relay, error){
		"no source": func() (*outbox.Relay, error) { return outbox.NewRelay(nil, good, outbox.RelayConfig{}) },
		"no transport": func() (*outbox.Relay, error) {
			return outbox.NewRelay(outboxtest.NewStore(), nil, outbox.RelayConfig{})
		},
		"nil transport": func() (*outbox.Relay, error) {
			return outbox.NewRelay(outboxtest.NewStore(), outbox.Transports{"": nil}, outbox.RelayConfig{})
		},
		"short lease": func() (*outbox.Relay, error) {
			return outbox.NewRelay(outboxtest.NewStore(), good, outbox.RelayConfig{LeaseTTL: 19 * time.Second})
		},
		"attempts of a free class": func() (*outbox.Relay, error) {
			return outbox.NewRelay(outboxtest.NewStore(), good, outbox.RelayConfig{MaxAttemptsByClass: map[outbox.Class]int{outbox.Blocked: 3}})
		},
		"batch": func() (*outbox.Relay, error) {
			return outbox.NewRelay(outboxtest.NewStore(), good, outbox.RelayConfig{BatchSize: -1})
		},
	} {
		if r, err := make(); err == nil || r != nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestHooksTellTheOutcomes(t *testing.T) {
	var published, paused []string
	var failures []outbox.Failure
	hooks := outbox.Hooks{
		OnPublished: func(_ context.Context, m outbox.Message) { published = append(published, string(m.Body)) },
		OnFailed:    func(_ context.Context, _ outbox.Message, f outbox.Failure) { failures = append(failures, f) },
		OnPause:     func(_ context.Context, transport string, _ error) { paused = append(paused, transport) },
	}
	inBubble(t, outbox.RelayConfig{Hooks: hooks, MaxAttempts: 2, Rand: half}, func(b *bench) {
		b.publisher.Script(failure(outbox.Unavailable), errors.New("first"), errors.New("second"))
		b.write(message("k", 1), message("k", 2))
		if _, err := b.relay.Drain(b.Context(), outbox.Bounds{TimeLimit: time.Minute}); err != nil {
			b.Error(err)
		}
		if !slices.Equal(published, []string{"2"}) || !slices.Equal(paused, []string{""}) || len(failures) != 2 {
			b.Fatalf("published %v, paused %q, failures %+v", published, paused, failures)
		}
		first, second := failures[0], failures[1]
		if first.Attempt != 1 || first.Dead || first.Delay != time.Second || second.Attempt != 2 || !second.Dead || second.Delay != 0 {
			b.Errorf("failures %+v", failures)
		}
	})
}

// A relay whose process was frozen wakes up beside the one that took over.
func TestPausedRelayWakesUpFenced(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		for n := range 4 {
			b.write(message("k", n))
		}
		frozen, err := b.store.Claim(b.Context(), outbox.ClaimRequest{Limit: 10, Lease: 30 * time.Second})
		if err != nil {
			b.Fatal(err)
		}
		b.publisher.Publish(b.Context(), frozen.Messages[0], func(error) {})
		stop := b.start()
		time.Sleep(time.Minute)
		stop()
		b.write(message("k", 4))
		// It goes on with its batch: late, but nothing arrives first out of order, and nothing is lost.
		stale, err := b.store.Settle(b.Context(), frozen, []outbox.Outcome{{ID: frozen.Messages[0].ID, Verdict: outbox.Dead}})
		if err != nil || len(stale) != 1 {
			b.Errorf("stale %v, %v", stale, err)
		}
		b.drain(outbox.Bounds{})
		b.wantReceived("0", "0", "1", "2", "3", "4")
	})
}

func TestPauseIsForgottenWithItsMessages(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.publisher.Respond(func(outbox.Message) error { return failure(outbox.Unavailable) })
		b.write(message("k", 1))
		defer b.start()()
		time.Sleep(time.Minute)
		if b.relay.Ready(b.Context()) == nil {
			b.Error("Ready while the only transport is down")
		}
		// Another relay, with a way to the broker, takes the message.
		other, err := outbox.NewRelay(b.store, outbox.Transports{"": outboxtest.NewPublisher()}, outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := other.Drain(b.Context(), outbox.Bounds{TimeLimit: time.Minute}); err != nil || len(b.store.List()) > 0 {
			b.Fatalf("%v, left %d", err, len(b.store.List()))
		}
		time.Sleep(time.Minute)
		if err := b.relay.Ready(b.Context()); err != nil {
			b.Errorf("Ready: %v", err)
		}
	})
}
