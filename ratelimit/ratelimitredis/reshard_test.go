package ratelimitredis_test

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// While the slot of the limits moves to another node, each decision is made or
// is ErrUnavailable, within the timeout; what was charged moves along.
func TestReshard(t *testing.T) {
	t.Parallel()
	client, servers := redistest.Cluster(t)
	const timeout = time.Second
	l := open(t, client, ratelimitredis.Config{Prefix: "test:" + rand.Text(), Timeout: timeout, DenyCache: -1, Logger: slog.New(slog.DiscardHandler)}).Probing(20 * time.Millisecond)
	c := []ratelimit.Charge{{Limit: ratelimit.Limit{Name: "user", Max: 300, Window: day}, Key: "ann"}, {Limit: ratelimit.Limit{Name: "global", Max: 1000, Window: day}}}
	var allowed, denied, failed atomic.Int64
	leave := crowd(t, func(ctx context.Context) {
		start := time.Now()
		d, err := l.Allow(ctx, c...)
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, ratelimit.ErrUnavailable):
			if failed.Add(1) == 1 {
				t.Logf("the first failure: %v", err)
			}
		case err != nil:
			t.Error(err)
		case d.Allowed:
			allowed.Add(1)
		default:
			denied.Add(1)
		}
		if took := time.Since(start); took > 10*timeout {
			t.Errorf("a call took %v", took)
		}
	})
	testenv.Eventually(t, func() error {
		if allowed.Load() < 50 {
			return errors.New("too few yet")
		}
		return nil
	})
	move := redistest.NewMove(t, client, servers, "{rl}")
	for _, step := range []func(context.Context) error{move.Begin, move.Keys, move.End} {
		if err := step(t.Context()); err != nil {
			t.Fatal(err)
		}
		_ = runloop.Sleep(t.Context(), 50*time.Millisecond) // some are asked meanwhile
	}
	testenv.Eventually(t, func() error {
		if denied.Load() == 0 {
			return errors.New("none denied yet")
		}
		return nil
	})
	leave()
	t.Logf("%d allowed, %d denied, %d failed", allowed.Load(), denied.Load(), failed.Load())
	if n := allowed.Load(); n > 300 || n+failed.Load() < 300 {
		t.Errorf("%d were allowed and %d not decided, with a limit of 300", n, failed.Load())
	}
}

// crowd asks from 8 goroutines, each a millisecond after its last question, until leave is called.
func crowd(t *testing.T, ask func(ctx context.Context)) (leave func()) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				ask(ctx)
				_ = runloop.Sleep(ctx, time.Millisecond)
			}
		})
	}
	return func() {
		stop()
		wg.Wait()
	}
}
