package idempotencyredis_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

const lanes = 4 // as the store has them

// slow is a server that answers when it is told to. It acquires every key.
type slow struct {
	answer chan struct{} // closed: at once

	mu    sync.Mutex
	alone int
	pipes []int // their lengths
}

func (*slow) DialHook(next redis.DialHook) redis.DialHook { return next }

func (h *slow) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error {
		h.mu.Lock()
		h.alone++
		h.mu.Unlock()
		<-h.answer
		cmd.(*redis.Cmd).SetVal(int64(1))
		return nil
	}
}

func (h *slow) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(_ context.Context, cmds []redis.Cmder) error {
		h.mu.Lock()
		h.pipes = append(h.pipes, len(cmds))
		h.mu.Unlock()
		for _, cmd := range cmds {
			cmd.(*redis.Cmd).SetVal(int64(1))
		}
		return nil
	}
}

// What is asked while all lanes are taken travels together; those who do not
// wait any more are not sent for.
func TestLanes(t *testing.T) {
	t.Parallel()
	h := &slow{}
	client := single(h)
	defer func() { _ = client.Close() }()
	synctest.Test(t, func(t *testing.T) {
		h.answer = make(chan struct{})
		s := newStore(t, client, idempotencyredis.Config{})
		var wg sync.WaitGroup
		ask := func(ctx context.Context, want error) {
			wg.Go(func() {
				out, err := s.Begin(ctx, idempotency.NewClaim(idempotency.NewKey(), fp))
				if !errors.Is(err, want) || want == nil && out.State != idempotency.Acquired {
					t.Errorf("Begin = %+v, %v; want %v", out, err, want)
				}
			})
		}
		for range lanes {
			ask(t.Context(), nil)
		}
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		ask(ctx, context.Canceled)
		for range 200 {
			ask(t.Context(), nil)
		}
		synctest.Wait()
		cancel()
		synctest.Wait()
		if h.alone != lanes || len(h.pipes) != 0 {
			t.Errorf("%d alone and %v in pipelines; want %d", h.alone, h.pipes, lanes)
		}
		close(h.answer)
		wg.Wait()
		sum := 0
		for _, n := range h.pipes {
			sum += n
		}
		if h.alone != lanes || sum != 200 || len(h.pipes) != 2 {
			t.Errorf("%d alone and %v in pipelines; want %d, and 200 in two", h.alone, h.pipes, lanes)
		}
		ask(t.Context(), nil) // the lanes are free again
		wg.Wait()
		if h.alone != lanes+1 {
			t.Errorf("%d alone; want %d", h.alone, lanes+1)
		}
	})
}

// A server that does not know the scripts is taught, in pipelines as well.
func TestScriptsAreTaught(t *testing.T) {
	t.Parallel()
	client := redistest.Client(t, redistest.URL(t))
	s := newStore(t, client, idempotencyredis.Config{})
	for range 10 {
		var wg sync.WaitGroup
		for range 20 * lanes {
			wg.Go(func() {
				c := idempotency.NewClaim(idempotency.NewKey(), fp)
				if out, err := s.Begin(t.Context(), c); err != nil || out.State != idempotency.Acquired {
					t.Errorf("Begin = %+v, %v", out, err)
				}
				if err := s.Complete(t.Context(), c, idempotency.Response{Status: 200}); err != nil {
					t.Error(err)
				}
			})
		}
		if err := client.ScriptFlush(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
	}
}
