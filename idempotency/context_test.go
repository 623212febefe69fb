package idempotency_test

import (
	"context"
	"errors"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

type valueKey struct{}

// The context of the work is made of parts of our own: it must not differ from
// one of the standard library.
func TestContextOfTheWork(t *testing.T) {
	t.Parallel()
	end := errors.New("client gone")
	for name, tt := range map[string]struct {
		work  func(ctx context.Context, hangUp func()) // waits for the context, or does not
		cause error
	}{
		"nobody waits": {func(context.Context, func()) {}, context.Canceled},
		"hung up before anybody waits": {func(ctx context.Context, hangUp func()) {
			hangUp()
			if ctx.Err() == nil || !errors.Is(context.Cause(ctx), end) {
				t.Errorf("Err %v, cause %v", ctx.Err(), context.Cause(ctx))
			}
			<-ctx.Done()
		}, end},
		"hung up while a child waits": {func(ctx context.Context, hangUp func()) {
			child, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			go hangUp()
			if <-child.Done(); !errors.Is(context.Cause(child), end) {
				t.Errorf("cause %v", context.Cause(child))
			}
		}, end},
		"AfterFunc": {func(ctx context.Context, hangUp func()) {
			called := make(chan struct{})
			context.AfterFunc(ctx, func() { close(called) })
			hangUp()
			<-called
		}, end},
		"deadline": {func(ctx context.Context, _ func()) {
			if d, ok := ctx.Deadline(); !ok || time.Until(d) != time.Minute {
				t.Errorf("deadline %v, %v", d, ok)
			}
			if _ = ctx.Done(); ctx.Err() != nil {
				t.Errorf("Err %v", ctx.Err())
			}
			if d, ok := ctx.Deadline(); !ok || time.Until(d) != time.Minute {
				t.Errorf("deadline %v, %v", d, ok)
			}
			<-ctx.Done()
		}, context.DeadlineExceeded},
	} {
		synctest.Test(t, func(t *testing.T) {
			parent, cancel := context.WithTimeout(context.WithValue(context.Background(), valueKey{}, "v"), time.Minute)
			defer cancel()
			parent, hangUp := context.WithCancelCause(parent)
			var left []context.Context
			_, _, err := idempotency.Do(parent, idempotencytest.NewStore(), goodKey, fp, func(ctx context.Context) (int, error) {
				left = append(left, ctx)
				tt.work(ctx, func() { hangUp(end) })
				for _, ctx := range []context.Context{ctx, context.WithoutCancel(ctx)} {
					if claim, ok := driver.ClaimFrom(ctx); !ok || claim.Key != goodKey || ctx.Value(valueKey{}) != "v" {
						t.Errorf("%s: claim %v, value %v", name, claim, ctx.Value(valueKey{}))
					}
				}
				return 1, nil
			})
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			// What the work has left behind ends with it.
			select {
			case <-left[0].Done():
			default:
				t.Errorf("%s: the context outlives the work", name)
			}
			if cause := context.Cause(left[0]); left[0].Err() == nil || !errors.Is(cause, tt.cause) {
				t.Errorf("%s: Err %v, cause %v; want %v", name, left[0].Err(), cause, tt.cause)
			}
		})
	}
}

// A client that hangs up interrupts neither the begin nor the end of a claim.
func TestStoreIsNotInterruptedByTheClient(t *testing.T) {
	t.Parallel()
	ctx, hangUp := context.WithCancel(context.WithValue(t.Context(), valueKey{}, "v"))
	hangUp()
	calls := 0
	look := func(ctx context.Context) {
		calls++
		left, ok := ctx.Deadline()
		select {
		case <-ctx.Done():
			t.Error("interrupted")
		default:
		}
		again, _ := ctx.Deadline()
		if ctx.Err() != nil || !ok || !left.Equal(again) || time.Until(left) > 5*time.Second || ctx.Value(valueKey{}) != "v" {
			t.Errorf("Err %v, deadline %v, value %v", ctx.Err(), left, ctx.Value(valueKey{}))
		}
	}
	h := protect(t, looking{idempotencytest.NewStore(), look}, idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) {})
	send(h, post(goodKey, nil).WithContext(ctx))
	if calls != 2 {
		t.Errorf("%d calls", calls)
	}
}

type looking struct {
	driver.Store
	look func(context.Context)
}

func (l looking) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	l.look(ctx)
	return l.Store.Begin(ctx, c)
}

func (l looking) Complete(ctx context.Context, c driver.Claim, r driver.Response) error {
	l.look(ctx)
	return l.Store.Complete(ctx, c, r)
}
