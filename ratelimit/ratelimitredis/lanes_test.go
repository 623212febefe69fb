package ratelimitredis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// forgetful makes the server answer NOSCRIPT from time to time.
type forgetful struct {
	held
	calls atomic.Int64
}

func (f *forgetful) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" && f.calls.Add(1)%10 == 5 {
			cmd.SetErr(redistest.Refusal("NOSCRIPT No matching script."))
			return cmd.Err()
		}
		return next(ctx, cmd)
	}
}

// Concurrent callers share round trips, and each gets its own answer, even if the server loses the script in the
// meantime.
func TestCallersShareRoundTrips(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	client.AddHook(&forgetful{})
	calls := &noted{}
	client.AddHook(calls)
	l := open(t, client, ratelimitredis.Config{DenyCache: -1}).OnePipeline()
	const users, each = 40, 25
	var wg sync.WaitGroup
	for u := range users {
		wg.Go(func() {
			allowed := 0
			for range each {
				d, err := l.Allow(t.Context(), ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: int64(1 + u%20), Window: day}, Key: fmt.Sprint(u)})
				if err != nil {
					t.Error(err)
				}
				if d.Allowed {
					allowed++
				}
			}
			if allowed != 1+u%20 {
				t.Errorf("user %d got %d, want %d", u, allowed, 1+u%20)
			}
		})
	}
	wg.Wait()
	if n := calls.take(); n > users*each/3 {
		t.Errorf("%d decisions of %d callers took %d round trips", users*each, users, n)
	}
}

// Of many denied requests only one a second reaches Redis.
func TestDenialsAreRemembered(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	calls := &noted{}
	client.AddHook(calls)
	l := open(t, client, ratelimitredis.Config{})
	c := []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "user", Max: 1, Window: day}, Key: "ann"}, {Limit: global}}
	var taken ratelimit.Decision
	start, asked := time.Now(), 0
	for n := range 1000 {
		d, err := l.Allow(t.Context(), c...)
		if err != nil || d.Allowed != (n == 0) {
			t.Fatalf("request %d: %+v, %v", n, d, err)
		}
		if n == 0 {
			taken = d
		}
		if !d.Cached {
			asked++
		}
	}
	if most := 2 + int(time.Since(start)/time.Second); asked > most { // timing: a slow machine may send more
		t.Errorf("%d of 1000 requests reached Redis in %v, want %d at most", asked, time.Since(start), most)
	}
	if n := calls.take(); n > 2*asked+2 { // some may get NOSCRIPT
		t.Errorf("%d requests to Redis took %d round trips", asked, n)
	}
	if err := l.Refund(t.Context(), taken.Charges()...); err != nil {
		t.Fatal(err)
	}
	if d, err := l.Allow(t.Context(), c...); err != nil || !d.Allowed {
		t.Errorf("after a refund: %+v, %v", d, err)
	}
	if err := l.Reset(t.Context(), c[0]); err != nil {
		t.Fatal(err)
	}
	if d, err := l.Allow(t.Context(), c...); err != nil || !d.Allowed {
		t.Errorf("after a reset: %+v, %v", d, err)
	}
}

// Units that one process charges and soon refunds, as for replays, become available to the others soon after, not
// when the cached denials would have ended.
func TestRefundsReachOtherProcesses(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	replaying, other := open(t, client, ratelimitredis.Config{}), open(t, client, ratelimitredis.Config{})
	for name, c := range map[string]ratelimit.Charge{
		"of everybody": {Limit: ratelimit.Limit{Name: "global", Max: 100, Window: day}, Cost: 100},
		"of one user":  {Limit: ratelimit.Limit{Name: "user", Max: 100, Window: day}, Key: "ann", Cost: 100},
	} {
		one := ratelimit.Charge{Limit: c.Limit, Key: c.Key}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			taken, err := replaying.Allow(t.Context(), c)
			if err != nil || !taken.Allowed {
				t.Fatalf("%+v, %v", taken, err)
			}
			if d, err := other.Allow(t.Context(), one); err != nil || d.Allowed || d.RetryAfter < time.Minute {
				t.Fatalf("%+v, %v, want a long denial", d, err)
			}
			if err := replaying.Refund(t.Context(), taken.Charges()...); err != nil {
				t.Fatal(err)
			}
			testenv.Eventually(t, func() error {
				d, err := other.Allow(t.Context(), one)
				if err == nil && !d.Allowed {
					err = fmt.Errorf("still denied, remembered: %v", d.Cached)
				}
				return err
			})
		})
	}
}

// A server that does not answer occupies a few pipelines, however many callers there are, and no caller waits longer
// than the timeout.
func TestPausedServer(t *testing.T) {
	t.Parallel()
	silent.BothClients(t, redistest.URL, -1, func(t *testing.T, client *redis.Client, server *silent.Redis) {
		const timeout = time.Second
		l := open(t, client, ratelimitredis.Config{Timeout: timeout, FailOpen: true, Logger: slog.New(slog.DiscardHandler)})
		c := ratelimit.Charge{Limit: perUser, Key: "ann"}
		if d, err := l.Allow(t.Context(), c); err != nil || d.Fallback {
			t.Fatalf("%+v, %v", d, err)
		}
		server.Pause()
		start := time.Now()
		var most atomic.Int64
		var wg sync.WaitGroup
		for range 200 {
			wg.Go(func() {
				for range 5 {
					if d, err := l.Allow(t.Context(), c); err != nil || !d.Fallback {
						t.Errorf("%+v, %v", d, err)
					}
					pipelines, _ := l.Load()
					most.Store(max(most.Load(), int64(pipelines)))
				}
			})
		}
		wg.Wait()
		// All first calls end at the same moment. A caller waits a second time if it calls before the breaker opens.
		if took := time.Since(start); took > 2*timeout {
			t.Errorf("five calls each took %v, want %v at most", took, 2*timeout)
		}
		if most.Load() > 50 {
			t.Errorf("the outage took %d pipelines", most.Load())
		}
	})
}

// The most callers that share a round trip, with the most limits in a decision.
func TestTheLargestRoundTrip(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	calls := &noted{}
	client.AddHook(calls)
	l := open(t, client, ratelimitredis.Config{DenyCache: -1}).OnePipeline()
	const callers, each = 300, 5
	var wg sync.WaitGroup
	for u := range callers {
		var charges []ratelimit.Charge
		for n := range driver.MaxCharges {
			limit := ratelimit.Limit{Name: fmt.Sprint("limit", n), Max: 3, Window: time.Duration(1+n) * day, Algorithm: ratelimit.Algorithm(n % 3)}
			charges = append(charges, ratelimit.Charge{Limit: limit, Key: fmt.Sprint(u)})
		}
		wg.Go(func() {
			allowed := 0
			for range each {
				d, err := l.Allow(t.Context(), charges...)
				if err != nil {
					t.Error(err)
					return
				}
				if d.Allowed {
					allowed++
				}
			}
			if allowed != 3 {
				t.Errorf("caller %d got %d, want 3", u, allowed)
			}
		})
	}
	wg.Wait()
	if n := calls.take(); n > callers*each/10 {
		t.Errorf("%d decisions took %d round trips", callers*each, n)
	}
}

// held is a client whose scripts wait until they are released.
type held struct {
	entered chan struct{}
	let     chan struct{}
}

func (h *held) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *held) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "evalsha" {
			select {
			case h.entered <- struct{}{}:
			default:
			}
			<-h.let
		}
		return next(ctx, cmd)
	}
}

func (h *held) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// A caller that gives up does not affect the others in its round trip. A call that was not yet sent is charged
// nothing, and the others get their answers.
func TestCallersWhoGiveUp(t *testing.T) {
	t.Parallel()
	client := redistest.New(t)
	hook := &held{entered: make(chan struct{}, 1), let: make(chan struct{})}
	l := open(t, client, ratelimitredis.Config{DenyCache: -1}).OnePipeline()
	c := ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 1000, Window: day}}
	if _, err := l.Allow(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	client.AddHook(hook)
	var first sync.WaitGroup
	first.Go(func() { // it started the round trip and gives up during it
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-hook.entered
			cancel()
		}()
		if _, err := l.Allow(ctx, c); !errors.Is(err, context.Canceled) {
			t.Errorf("the caller that started it got %v", err)
		}
	})
	first.Wait()
	gone, cancel := context.WithCancel(t.Context())
	var leavers, stayers sync.WaitGroup
	for range 20 {
		leavers.Go(func() {
			if _, err := l.Allow(gone, c); !errors.Is(err, context.Canceled) {
				t.Errorf("a caller that gave up got %v", err)
			}
		})
		stayers.Go(func() {
			if d, err := l.Allow(t.Context(), c); err != nil || !d.Allowed {
				t.Errorf("a caller that stayed got %+v, %v", d, err)
			}
		})
	}
	testenv.Eventually(t, func() error {
		if _, n := l.Load(); n != 40 {
			return fmt.Errorf("%d wait", n)
		}
		return nil
	})
	cancel()
	leavers.Wait()
	close(hook.let)
	stayers.Wait()
	if d, err := l.Peek(t.Context(), c); err != nil || d.Limits()[0].Remaining != 1000-1-1-20-1 {
		t.Errorf("%v, %v: want charges of the first, of the running one and of the 20 that stayed", d.Limits(), err)
	}
}

// A closed client counts as an unavailable store, and no goroutine of the limiter remains.
func TestClosedClient(t *testing.T) {
	t.Parallel()
	opts := *redistest.New(t).Options()
	client := redis.NewClient(&opts)
	l := open(t, client, ratelimitredis.Config{})
	c := ratelimit.Charge{Limit: perUser, Key: "ann"}
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 50 {
				if _, err := l.Allow(t.Context(), c); err != nil && !errors.Is(err, ratelimit.ErrUnavailable) {
					t.Error(err)
				}
			}
		})
	}
	runtime.Gosched()
	if err := client.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if _, err := l.Allow(t.Context(), ratelimit.Charge{Limit: perUser, Key: "bob"}); !errors.Is(err, ratelimit.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
	testenv.Eventually(t, func() error {
		if n, _ := l.Load(); n != 0 {
			return fmt.Errorf("%d still run", n)
		}
		return nil
	})
}
