package ratelimitredis_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// forgetful has the server know no script from time to time.
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

// Callers at the same time share round trips, and each gets its own answer, also
// where the server forgets the script meanwhile.
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

// Of a flood of denied requests one a second reaches Redis.
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
	if most := 2 + int(time.Since(start)/time.Second); asked > most {
		t.Errorf("%d of 1000 requests were asked about in %v, want %d at most", asked, time.Since(start), most)
	}
	if n := calls.take(); n > 2*asked+2 { // some may find the script unknown
		t.Errorf("%d requests that were asked about took %d round trips", asked, n)
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

// Units that one process takes for a moment, as replays do, and gives back are
// there for the others soon after, not when their denials would have ended.
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
				t.Fatalf("%+v, %v, want a denial for long", d, err)
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

// However many callers ask, a server that does not answer holds a few pipelines, and no caller longer than the timeout.
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
		silent.Took(t, "five calls each", start, 2*timeout) // then the breaker is open
		if most.Load() > 50 {
			t.Errorf("the outage took %d pipelines", most.Load())
		}
	})
}
