package outbox_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/metrictest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// halfFull is a publisher whose window is half full.
type halfFull struct{ *outboxtest.Publisher }

func (halfFull) Window() (used, size int) { return 5, 10 }

func newManager() *txretrytest.Manager { return txretrytest.New(txretrytest.Config{}) }

// measured runs fn with a bench that has a second transport, "w", which reports its window.
func measured(t *testing.T, source func(*outboxtest.Store) driver.Source, fn func(b *bench, r *metrictest.Recorder)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &bench{T: t, manager: newManager(), store: outboxtest.New(), publisher: outboxtest.NewPublisher()}
		r := &metrictest.Recorder{}
		var err error
		b.relay, err = outbox.NewRelay(source(b.store), b.publisher,
			outbox.RelayConfig{
				Transports: map[string]driver.Publisher{"w": halfFull{outboxtest.NewPublisher()}},
				Logger:     slog.New(slog.DiscardHandler), MeterProvider: r, PollInterval: time.Hour,
				Rand:  half,
				Retry: outbox.RetryPolicy{BaseDelay: time.Hour, MaxDelay: time.Hour},
			})
		must(t, err)
		b.relay.SetPauses(time.Minute, time.Minute)
		fn(b, r)
	})
}

func itself(s *outboxtest.Store) driver.Source { return s }

func wantGauges(t *testing.T, r *metrictest.Recorder, want map[string]float64) {
	t.Helper()
	got, err := r.Collect(t.Context())
	if err != nil {
		t.Error(err)
	}
	for name, v := range want {
		if g, ok := got[name]; !ok || g != v {
			t.Errorf("%s is %v (%v), want %v", name, g, ok, v)
		}
	}
}

func TestGaugesFollowTheRelay(t *testing.T) {
	measured(t, itself, func(b *bench, r *metrictest.Recorder) {
		if got, _ := r.Collect(b.Context()); len(got) != 0 {
			b.Errorf("before Run: %v", got)
		}
		b.publisher.Respond(func(m driver.Message) error {
			switch string(m.Body) {
			case "1":
				return failure(driver.Retryable)
			case "2":
				return failure(driver.Permanent)
			}
			return nil
		})
		b.write(message("a", 1), message("b", 2), message("c", 3))
		stop := b.start()
		time.Sleep(10 * time.Second)
		wantGauges(b.T, r, map[string]float64{
			"holdfast.outbox.depth{outbox=,state=ready}": 0, "holdfast.outbox.depth{outbox=,state=parked}": 1, "holdfast.outbox.depth{outbox=,state=dead}": 1,
			"holdfast.outbox.oldest.age{outbox=}":                               10,
			"holdfast.outbox.transport.state{outbox=,state=closed,transport=}":  1,
			"holdfast.outbox.transport.state{outbox=,state=paused,transport=}":  0,
			"holdfast.outbox.transport.state{outbox=,state=closed,transport=w}": 1,
			"holdfast.outbox.window.fill{outbox=,transport=w}":                  0.5,
		})
		stop()
		if got, _ := r.Collect(b.Context()); len(got) != 0 {
			b.Errorf("after Run: %v", got)
		}
	})
}

func TestBreakerStates(t *testing.T) {
	measured(t, itself, func(b *bench, r *metrictest.Recorder) {
		b.publisher.Respond(func(driver.Message) error { return failure(driver.Unavailable) })
		b.write(message("a", 1))
		defer b.start()()
		wants := func(when string, state string, failures int) {
			b.Helper()
			synctest.Wait()
			stats, err := b.relay.Stats(b.Context())
			must(b, err)
			if s := stats.Transports[""]; s.State != state || s.Failures != failures || (s.Err != nil) != (failures > 0) {
				b.Errorf("%s: %+v, want %s after %d failures", when, s, state, failures)
			}
			if s := stats.Transports["w"]; s.State != "closed" || s.Window != 0.5 {
				b.Errorf("%s: the other transport is %+v", when, s)
			}
			wantGauges(b.T, r, map[string]float64{"holdfast.outbox.transport.state{outbox=,state=" + string(state) + ",transport=}": 1})
		}
		time.Sleep(time.Second)
		wants("down", "paused", 1)
		b.publisher.Latency(5 * time.Second)
		b.publisher.Respond(nil)
		time.Sleep(61 * time.Second)
		wants("tried", "probing", 1)
		time.Sleep(10 * time.Second)
		wants("up", "closed", 0)
	})
}

func TestLagAndConfirmLatency(t *testing.T) {
	measured(t, itself, func(b *bench, r *metrictest.Recorder) {
		b.publisher.Latency(250 * time.Millisecond)
		b.write(message("a", 1), message("", 2))
		time.Sleep(2 * time.Second)
		b.drain(outbox.Bounds{})
		if got := r.Values("holdfast.outbox.lag{outbox=,transport=}"); !slices.Equal(got, []float64{2.25, 2.25}) {
			b.Errorf("lag %v", got)
		}
		if got := r.Values("holdfast.outbox.confirm.duration{outbox=,transport=}"); !slices.Equal(got, []float64{0.25, 0.25}) {
			b.Errorf("confirm %v", got)
		}
		b.publisher.Respond(func(driver.Message) error { return failure(driver.Retryable) })
		b.write(message("a", 3))
		b.drain(outbox.Bounds{})
		if got := r.Values("holdfast.outbox.lag{outbox=,transport=}"); len(got) != 2 {
			b.Errorf("a failure has a lag: %v", got)
		}
	})
}

// asked is a Source that counts the calls of Depth, and blocks them while hangs is set.
type asked struct {
	driver.Source
	measured driver.Measured
	mu       sync.Mutex
	times    int
	hangs    bool
}

func (a *asked) Depth(ctx context.Context) (driver.Depth, error) {
	a.mu.Lock()
	a.times++
	hangs := a.hangs
	a.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return driver.Depth{}, ctx.Err()
	}
	return a.measured.Depth(ctx)
}

func (a *asked) hang(hangs bool) (times int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.hangs = hangs
	return a.times
}

// The gauges read the store seldom. A store that does not answer delays neither the other gauges nor the end of Run.
func TestGauges_readStoreSeldomAndDoNotHang(t *testing.T) {
	var source *asked
	wrap := func(s *outboxtest.Store) driver.Source {
		source = &asked{Source: s, measured: s}
		return source
	}
	measured(t, wrap, func(b *bench, r *metrictest.Recorder) {
		b.write(message("a", 1))
		stop := b.start()
		synctest.Wait()
		for range 10 {
			if _, err := r.Collect(b.Context()); err != nil {
				b.Error(err)
			}
			time.Sleep(time.Second)
		}
		if times := source.hang(true); times != 2 {
			b.Errorf("the store was read %d times in 10 s", times)
		}
		begin := time.Now()
		got, err := r.Collect(b.Context())
		if took := time.Since(begin); err == nil || took != 2*time.Second {
			b.Errorf("with a hanging store: %v after %v", err, took)
		}
		if _, ok := got["holdfast.outbox.transport.state{outbox=,state=closed,transport=}"]; !ok {
			b.Errorf("without the other gauges: %v", got)
		}
		if _, ok := got["holdfast.outbox.depth{outbox=,state=ready}"]; ok {
			b.Errorf("with an old depth: %v", got)
		}
		if _, err := b.relay.Stats(b.Context()); !errors.Is(err, context.DeadlineExceeded) {
			b.Errorf("Stats: %v", err)
		}
		time.Sleep(5 * time.Second)
		collected := make(chan error)
		go func() { _, err := r.Collect(b.Context()); collected <- err }()
		synctest.Wait()
		begin = time.Now()
		stop()
		if err := <-collected; err == nil || time.Since(begin) > 0 {
			b.Errorf("the end of Run waited for the store: %v, %v", time.Since(begin), err)
		}
	})
}

// bare is a Source that does not report its backlog.
type bare struct{ driver.Source }

func TestStatsWithoutAMeasuredSource(t *testing.T) {
	measured(t, func(s *outboxtest.Store) driver.Source { return bare{s} }, func(b *bench, r *metrictest.Recorder) {
		defer b.start()()
		synctest.Wait()
		stats, err := b.relay.Stats(b.Context())
		if err != nil || stats.Ready != 0 || len(stats.Transports) != 2 {
			b.Errorf("%+v, %v", stats, err)
		}
		got, err := r.Collect(b.Context())
		if _, ok := got["holdfast.outbox.oldest.age{outbox=}"]; err != nil || ok || len(got) != 7 {
			b.Errorf("%v, %v", got, err)
		}
	})
}

// named is a Source whose outbox has a name.
type named struct {
	*outboxtest.Store
	name string
}

func (n named) Name() string { return n.name }

// The relays of two outboxes in one process report on their own.
func TestMetrics_twoOutboxes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := &metrictest.Recorder{}
		for i, name := range []string{"billing", "mail"} {
			b := &bench{T: t, manager: newManager(), store: outboxtest.New(), publisher: outboxtest.NewPublisher()}
			var err error
			b.relay, err = outbox.NewRelay(named{b.store, name}, halfFull{b.publisher},
				outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler), MeterProvider: r, PollInterval: time.Hour})
			must(t, err)
			b.publisher.Respond(func(m driver.Message) error {
				if m.Key == "bad" {
					return failure(driver.Permanent)
				}
				return nil
			})
			b.write(message("", 1))
			for n := range i + 1 {
				b.write(message("bad", n))
			}
			defer b.start()()
		}
		time.Sleep(10 * time.Second)
		wantGauges(t, r, map[string]float64{
			"holdfast.outbox.depth{outbox=billing,state=dead}":                        1,
			"holdfast.outbox.depth{outbox=mail,state=dead}":                           2,
			"holdfast.outbox.oldest.age{outbox=billing}":                              0,
			"holdfast.outbox.oldest.age{outbox=mail}":                                 0,
			"holdfast.outbox.transport.state{outbox=billing,state=closed,transport=}": 1,
			"holdfast.outbox.transport.state{outbox=mail,state=closed,transport=}":    1,
			"holdfast.outbox.window.fill{outbox=billing,transport=}":                  0.5,
			"holdfast.outbox.window.fill{outbox=mail,transport=}":                     0.5,
		})
		for _, name := range []string{"billing", "mail"} {
			for _, metric := range []string{
				"published{outbox=" + name + "}", "failed{class=permanent,dead=true,outbox=" + name + "}", "given_back{outbox=" + name + "}",
				"batch.duration{outbox=" + name + "}", "lag{outbox=" + name + ",transport=}", "confirm.duration{outbox=" + name + ",transport=}",
			} {
				if len(r.Values("holdfast.outbox."+metric)) == 0 {
					t.Errorf("no %s; all: %v", metric, r.Take())
				}
			}
		}
	})
}
