package idempotency_test

import (
	"context"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
)

// late takes the key, and answers Begin when nobody waits for it any more.
type late struct{ *idempotencytest.Store }

func (l late) Begin(ctx context.Context, c driver.Claim) (driver.BeginResult, error) {
	_, _ = l.Store.Begin(ctx, c)
	<-ctx.Done()
	return driver.BeginResult{}, ctx.Err()
}

// An error that passes does not cost the result of a run.
func TestCompletionIsTriedAgain(t *testing.T) {
	t.Parallel()
	for what, failures := range map[string]int{"once": 1, "for a while": 5} {
		synctest.Test(t, func(t *testing.T) {
			asked := 0
			store := &faulty{Store: idempotencytest.NewStore(), complete: func() error {
				if asked++; asked <= failures {
					return errDown
				}
				return nil
			}}
			h := protect(t, store, idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) {})
			for _, replayed := range []string{"", "true"} {
				if rec := send(h, post(goodKey, nil)); rec.Code != 200 || rec.Header().Get(idempotency.ReplayedHeader) != replayed {
					t.Errorf("%s: %d %v", what, rec.Code, rec.Header())
				}
			}
		})
	}
}

// What a caller who has given up may have begun is not left to its lease.
func TestAbandonedBeginFreesTheKey(t *testing.T) {
	t.Parallel()
	for name, ask := range map[string]func(store driver.Store){
		"timeout": func(store driver.Store) {
			send(protect(t, store, idempotency.MiddlewareConfig{}, unreached(t)), post(goodKey, nil))
		},
		"cancelled": func(store driver.Store) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			_, _, err := idempotency.Do(ctx, store, goodKey, fp, func(context.Context) (int, error) { return 0, nil })
			if err == nil {
				t.Error("no error")
			}
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			memory := idempotencytest.NewStore()
			ask(late{memory})
			synctest.Wait()
			h := protect(t, memory, idempotency.MiddlewareConfig{}, func(http.ResponseWriter, *http.Request) {})
			if rec := send(h, post(goodKey, nil)); rec.Code != 200 {
				t.Errorf("%s: the next request gets %d %s", name, rec.Code, rec.Body)
			}
		})
	}
}
