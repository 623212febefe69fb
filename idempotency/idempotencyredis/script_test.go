package idempotencyredis_test

import (
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencyredis"
	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A server that does not know the scripts is taught, in pipelines as well.
func TestScriptsAreTaught(t *testing.T) {
	t.Parallel()
	client := redistest.Client(t, testenv.Private(t, testenv.Redis).URL()) // other tests need their scripts
	s := newStore(t, client, idempotencyredis.Config{})
	for range 10 {
		var wg sync.WaitGroup
		for range 80 {
			wg.Go(func() {
				c := driver.NewClaim(driver.Key(idempotency.NewKey()), fp)
				if out, err := s.Begin(t.Context(), c); err != nil || out.State != driver.Acquired {
					t.Errorf("Begin = %+v, %v", out, err)
				}
				if err := s.Complete(t.Context(), c, driver.Response{Status: 200}); err != nil {
					t.Error(err)
				}
			})
		}
		must(t, client.ScriptFlush(t.Context()).Err())
		wg.Wait()
	}
}
