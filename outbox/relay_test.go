package outbox_test

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

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
		// At most three in turn; the unkeyed messages are in flight at the same time. The relay claims four lanes at
		// a time.
		if took := time.Since(begin); took > 60*time.Millisecond {
			b.Errorf("it took %v: the messages were sent one by one", took)
		}
		var keyed []string
		for _, m := range b.publisher.Received() {
			if m.Key == "k" {
				keyed = append(keyed, string(m.Body))
			}
		}
		if !slices.Equal(keyed, []string{"1", "2", "3"}) {
			b.Errorf("key was received as %v", keyed)
		}
	})
}

// The messages of one key may together take longer than PublishTimeout. This is not an outage of the broker.
func TestRelay_slowKeyIsNoOutage(t *testing.T) {
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
			b.Errorf("the rest was not released: %v, %v", batch, err)
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

// journal records events in order.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) note(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, line)
}

func (j *journal) want(t *testing.T, want ...string) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	if !slices.Equal(j.lines, want) {
		t.Errorf("%q, want %q", j.lines, want)
	}
}

// serving is a Publisher with a Run method.
type serving struct {
	*outboxtest.Publisher
	*journal
	ready error
}

func (s *serving) Run(ctx context.Context) error {
	s.note("publisher runs")
	<-ctx.Done()
	s.note("publisher ends")
	return nil
}

func (s *serving) Ready(context.Context) error { return s.ready }

func (s *serving) Publish(ctx context.Context, m driver.Message, done func(error)) {
	s.Publisher.Publish(ctx, m, func(err error) {
		s.note("confirm")
		done(err)
	})
}

// background is a Source with background work.
type background struct {
	driver.Source
	*journal
	wake   chan func() bool
	linger time.Duration
}

func (b *background) Background(ctx context.Context, wake func() bool) {
	b.note("store works")
	b.wake <- wake
	<-ctx.Done()
	time.Sleep(b.linger) // timing: in a bubble
	b.note("store ends")
}

func (b *background) PrunePass(ctx context.Context) {
	b.note("prune")
	if deadline, ok := ctx.Deadline(); !ok || time.Until(deadline) > 15*time.Second {
		b.note("no deadline")
	}
}

func (b *bench) serving(linger time.Duration, cfg outbox.RelayConfig) (*serving, *background) {
	b.Helper()
	j := &journal{}
	s := &serving{Publisher: b.publisher, journal: j}
	source := &background{b.store, j, make(chan func() bool, 1), linger}
	b.between(source, s, cfg)
	return s, source
}

// The publisher's connection ends after the last confirm. Run returns after everything that it started has ended.
func TestRunOwnsPublishersAndBackground(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		s, _ := b.serving(5*time.Second, outbox.RelayConfig{})
		b.publisher.Latency(2 * time.Second)
		stop := b.start()
		synctest.Wait()
		b.write(message("k", 1))
		time.Sleep(1500 * time.Millisecond) // the poll found it
		stop()
		if len(s.lines) < 2 {
			b.Fatal(s.lines)
		}
		slices.Sort(s.lines[:2]) // they start together
		s.want(b.T, "publisher runs", "store works", "confirm", "store ends", "publisher ends")
	})
}

// An accepted wake-up causes one last claim. After that, no wake-up is accepted.
func TestLastWakeUp(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		_, source := b.serving(0, outbox.RelayConfig{PollInterval: time.Hour})
		ctx, cancel := context.WithCancel(b.Context())
		ended := make(chan error, 1)
		go func() { ended <- b.relay.Run(ctx) }()
		wake := <-source.wake
		synctest.Wait()
		b.write(message("k", 1))
		if !wake() {
			b.Error("not woken")
		}
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
		b.wantReceived("1")
		if wake() {
			b.Error("woken after the end of Run")
		}
	})
}

// A relay whose default transport or store is paused rejects wake-ups, so that another relay can be woken.
func TestWakeIsRefused(t *testing.T) {
	for name, set := range map[string]func(b *bench, f *faulty, down bool){
		"transport": func(b *bench, _ *faulty, down bool) {
			b.publisher.Respond(func(driver.Message) error {
				if down {
					return failure(driver.Unavailable)
				}
				return nil
			})
			b.write(message("k", 1))
		},
		"store": func(_ *bench, f *faulty, down bool) {
			f.set(nil, nil)
			if down {
				f.set(errors.New("down"), nil)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{}, func(b *bench) {
				f := &faulty{Source: b.store}
				source := &background{f, &journal{}, make(chan func() bool, 1), 0}
				b.over(source, outbox.RelayConfig{})
				b.relay.SetPauses(time.Minute, time.Minute)
				defer b.start()()
				wake := <-source.wake
				synctest.Wait()
				if !wake() {
					b.Error("rejected without a pause")
				}
				set(b, f, true)
				time.Sleep(5 * time.Second)
				if wake() {
					b.Error("accepted during the pause")
				}
				set(b, f, false)
				time.Sleep(2 * time.Minute)
				if !wake() {
					b.Error("rejected after the pause")
				}
			})
		})
	}
}

// A Drain keeps the connection too. At the end it prunes once, with a deadline.
func TestDrainRunsPublishersAndPrunes(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		s, _ := b.serving(0, outbox.RelayConfig{})
		b.write(message("k", 1))
		b.drain(outbox.Bounds{TimeLimit: time.Second})
		slices.Sort(s.lines[:2]) // they start together
		s.want(b.T, "confirm", "publisher runs", "prune", "publisher ends")
	})
}

// A cancelled Drain does not prune, because its caller waits for it.
func TestCancelledDrainDoesNotPrune(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		s, _ := b.serving(0, outbox.RelayConfig{})
		ctx, cancel := context.WithCancel(b.Context())
		time.AfterFunc(time.Second, cancel)
		if _, err := b.relay.Drain(ctx, outbox.Bounds{TimeLimit: time.Hour}); err != nil {
			b.Error(err)
		}
		s.want(b.T, "publisher runs", "publisher ends")
	})
}

// joined is a Source on which a Run starts while a Drain prunes.
type joined struct {
	driver.Source
	join func() // starts the Run
	runs atomic.Bool
	slow time.Duration // the time of a claim of the Run
	err  error         // of a claim of the Run

	refused error // of a settlement of the Drain
}

func (s *joined) PrunePass(context.Context) {
	s.runs.Store(true)
	s.join()
	time.Sleep(time.Second) // timing: in a bubble
}

func (s *joined) Claim(ctx context.Context, req driver.Claim) (driver.Batch, error) {
	if !s.runs.Load() {
		return s.Source.Claim(ctx, req)
	}
	time.Sleep(s.slow) // timing: in a bubble
	return driver.Batch{}, s.err
}

func (s *joined) Settle(ctx context.Context, b driver.Batch, settlements []driver.Settlement) (driver.Settled, error) {
	settled, err := s.Source.Settle(ctx, b, settlements)
	settled.Refused = s.refused
	return settled, err
}

// The result of a Drain does not depend on a Run of the same relay.
func TestDrain_besideRun(t *testing.T) {
	for name, source := range map[string]*joined{
		"that has not claimed yet": {slow: 2 * time.Second},
		"whose claims fail":        {err: errors.New("down")},
		"whose claims succeed":     {refused: errDiskFull},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{}, func(b *bench) {
				stop := func() {}
				defer func() { stop() }()
				source.Source, source.join = b.store, func() { stop = b.start() }
				b.over(source, outbox.RelayConfig{})
				b.write(message("k", 1))
				report, err := b.relay.Drain(b.Context(), outbox.Bounds{Limit: 1})
				if report.Published != 1 || !errors.Is(err, source.refused) {
					b.Errorf("%+v, %v, want the error %v", report, err, source.refused)
				}
				if succeeds := source.slow == 0 && source.err == nil; (b.relay.Ready(b.Context()) == nil) != succeeds {
					b.Errorf("ready: %v", !succeeds)
				}
			})
		})
	}
}

// A publisher that stops by itself is logged, and Run continues.
func TestPublisherThatEnds(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		var text syncBuffer
		b.between(b.store, ending{b.publisher}, outbox.RelayConfig{Logger: slog.New(slog.NewTextHandler(&text, nil))})
		stop := b.start()
		synctest.Wait()
		b.write(message("k", 1))
		time.Sleep(time.Minute)
		stop()
		b.wantReceived("1")
		if !strings.Contains(text.String(), "stopped before its relay") {
			b.Errorf("logged %s", text.String())
		}
	})
}

type ending struct{ *outboxtest.Publisher }

func (ending) Run(context.Context) error { return errors.New("a wrong password") }

func (ending) Ready(context.Context) error { return nil }

func TestReadyAsksThePublisher(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		s, _ := b.serving(0, outbox.RelayConfig{})
		defer b.start()()
		synctest.Wait()
		if err := b.relay.Ready(b.Context()); err != nil {
			b.Error(err)
		}
		s.ready = errors.New("no connection")
		if err := b.relay.Ready(b.Context()); !errors.Is(err, s.ready) {
			b.Errorf("ready without a connection: %v", err)
		}
	})
}

// checkedStore and checkedPublisher return the configured findings.
type checkedStore struct {
	driver.Source
	found error
}

func (c checkedStore) Check(context.Context) error { return c.found }

type checkedPublisher struct {
	*outboxtest.Publisher
	found error
}

func (c checkedPublisher) Check(context.Context) error { return c.found }

func TestCheckJoinsTheFindings(t *testing.T) {
	t.Parallel()
	two := check.Findings{Component: "store"}
	two.Add("call Migrate", "no table")
	two.Add("call Migrate", "no index")
	away := errors.New("publisher: check: no connection")
	for _, tc := range []struct {
		store, publisher error
		want             int
	}{{nil, nil, 0}, {two.Err(), nil, 2}, {two.Err(), away, 3}, {nil, away, 1}} {
		relay, err := outbox.NewRelay(checkedStore{outboxtest.New(), tc.store}, checkedPublisher{outboxtest.NewPublisher(), tc.publisher},
			outbox.RelayConfig{Transports: map[string]driver.Publisher{"plain": outboxtest.NewPublisher()}})
		must(t, err)
		var single []error
		if err := relay.Check(t.Context()); err != nil {
			single = err.(interface{ Unwrap() []error }).Unwrap()
		}
		if len(single) != tc.want {
			t.Errorf("found %v, want %d", single, tc.want)
		}
		for _, err := range single {
			if _, ok := err.(interface{ Fix() string }); ok == errors.Is(err, away) {
				t.Errorf("%v: is a finding: %t", err, ok)
			}
		}
	}
}

// exits is a Source whose Claim ends the caller's goroutine when now is set.
type exits struct {
	driver.Source
	now atomic.Bool
}

func (e *exits) Claim(ctx context.Context, r driver.Claim) (driver.Batch, error) {
	if e.now.Load() {
		runtime.Goexit()
	}
	return e.Source.Claim(ctx, r)
}

// The Done channel of context.Background is nil. Run works with it like with any other context.
func TestRunOnBackground(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		source := &exits{Source: b.store}
		b.over(source, outbox.RelayConfig{})
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			b.Errorf("Run returned %v", b.relay.Run(context.Background()))
		}()
		for _, n := range []int{1, 2} {
			b.write(message("k", n))
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		b.wantReceived("1", "2")
		source.now.Store(true) // nothing else ends this Run
		<-ended
	})
}

func TestDrainOnBackground(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.write(message("k", 1))
		for _, bounds := range []outbox.Bounds{{}, {TimeLimit: time.Minute}} {
			if _, err := b.relay.Drain(context.Background(), bounds); err != nil {
				b.Error(err)
			}
		}
		b.wantReceived("1")
	})
}

// A relay that has stopped is not ready, whatever its last poll returned. A Drain does not make it ready.
func TestNotReadyAfterRun(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		for range 2 {
			b.drain(outbox.Bounds{})
			if _, idle := errors.AsType[runloop.NotRunning](b.relay.Ready(b.Context())); !idle {
				b.Error("ready after a Drain")
			}
			stop := b.start()
			time.Sleep(time.Minute)
			if err := b.relay.Ready(b.Context()); err != nil {
				b.Errorf("while it runs: %v", err)
			}
			stop()
			if b.relay.Ready(b.Context()) == nil {
				b.Error("ready after Run has ended")
			}
		}
	})
}
