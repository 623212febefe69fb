package ratelimitredis_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/ratelimit"
	"github.com/holdfast-go/holdfast/ratelimit/driver"
	"github.com/holdfast-go/holdfast/ratelimit/ratelimitredis"
)

// As many callers as travel together, with as many limits as a decision has.
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

// held is a client whose scripts wait until they are let go.
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

// Who gives up while others share the round trip takes nothing from them: a call
// that was not yet sent is charged nothing, and the others get their answers.
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
	first.Go(func() { // it began the round trip, and gives up while that is under way
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			<-hook.entered
			cancel()
		}()
		if _, err := l.Allow(ctx, c); !errors.Is(err, context.Canceled) {
			t.Errorf("who began it got %v", err)
		}
	})
	first.Wait()
	gone, cancel := context.WithCancel(t.Context())
	var leavers, stayers sync.WaitGroup
	for range 20 {
		leavers.Go(func() {
			if _, err := l.Allow(gone, c); !errors.Is(err, context.Canceled) {
				t.Errorf("who gave up got %v", err)
			}
		})
		stayers.Go(func() {
			if d, err := l.Allow(t.Context(), c); err != nil || !d.Allowed {
				t.Errorf("who stayed got %+v, %v", d, err)
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
		t.Errorf("%v, %v: want charges of the first, of the one under way and of the 20 who stayed", d.Limits(), err)
	}
}

// A client that was closed is a store that cannot be asked; nothing of the
// limiter goes on.
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
			return fmt.Errorf("%d go on", n)
		}
		return nil
	})
}
