package engine_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// More messages than are kept on trial lack a server that others do not need: those that make room go
// behind the others, for the queue would hand them out first again.
func TestManyMessagesLackTheirServer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const lacking, others = 600, 20
		var passed atomic.Int32
		p := processorFunc(func(_ context.Context, m *inbox.Message) error {
			if m.Name == "lacking" {
				return inbox.Unavailable(errBroken)
			}
			passed.Add(1)
			return nil
		})
		b := newBench(t, p, engine.Config{}, memqueue.Options{Split: true})
		b.put("lacking", lacking)
		b.put("other", others)
		b.start()
		for end := time.Now().Add(10 * time.Minute); passed.Load() < others && time.Now().Before(end); {
			time.Sleep(time.Second)
		}
		if n := passed.Load(); n != others {
			t.Errorf("%d of %d other messages went through", n, others)
		}
	})
}
