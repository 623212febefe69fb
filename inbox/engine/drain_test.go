package engine_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
)

// A drain in a pause gives back what was held for it, and ends at once.
func TestDrainInAPause(t *testing.T) {
	bubble(t, func(t *testing.T) {
		got := &recorder{fail: func(context.Context, *inbox.Message) error { return inbox.Unavailable(errBroken) }}
		b := newBench(t, got, engine.Config{}, memqueue.Options{})
		b.put("good", 40)
		b.start()
		eventually(t, "paused", func() bool { err := ready(b); return err != nil && strings.Contains(err.Error(), "paused") })
		time.Sleep(100 * time.Millisecond)
		if took := b.stop(); took > time.Second {
			t.Errorf("it took %v", took)
		}
		if n := newRecount(t, b); n != 40 {
			t.Errorf("%d messages left", n)
		}
	})
}
