package operator_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/inbox"
)

// alone has dead letters that fail the test where two look at the same time.
type alone struct {
	inbox.DeadLetters
	t     *testing.T
	taken *sync.Mutex
}

// aloneConsumer has them.
type aloneConsumer struct{ alone alone }

func (c aloneConsumer) DeadLetters() inbox.DeadLetters { return c.alone }

func (a alone) look() {
	a.t.Helper()
	if !a.taken.TryLock() {
		a.t.Error("two look at the same time")
		return
	}
	defer a.taken.Unlock()
	time.Sleep(time.Millisecond)
}

func (a alone) List(ctx context.Context, f inbox.Filter) ([]inbox.DeadLetter, error) {
	a.look()
	return a.DeadLetters.List(ctx, f)
}

func (a alone) Groups(ctx context.Context, f inbox.Filter) ([]inbox.Group, error) {
	a.look()
	return a.DeadLetters.Groups(ctx, f)
}

func (a alone) Replay(ctx context.Context, f inbox.Filter, how inbox.Replay) (inbox.Replayed, error) {
	a.look()
	return a.DeadLetters.Replay(ctx, f, how)
}

// Of many who look at a consumer's dead letters each sees all of them, as they take turns.
func TestPageViewersTakeTurns(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: aloneConsumer{alone{r.cfg.Consumers[0].Consumer.DeadLetters(), t, &sync.Mutex{}}}}}
	r.Operator = must(operator.New(r.cfg))(t)
	s := serve(t, r, operator.PageConfig{Authorize: everything})
	var viewers sync.WaitGroup
	for range 10 {
		for view, part := range map[string]string{"groups": "no handler for c", "letters?from=billing": "3 in all", "preview?what=retry&from=billing": "3 would be sent again"} {
			viewers.Go(func() { s.get(t, view, 200, part) })
		}
	}
	viewers.Wait()
}
