package inboxtest_test

import (
	"context"
	"runtime"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
)

// A processor that panics or exits its goroutine fails its message; the others go on.
func TestConsumerSurvivesTheProcessor(t *testing.T) {
	t.Parallel()
	done := 0
	p := processor(func(_ context.Context, m *inbox.Message) error {
		switch m.Name {
		case "exits":
			runtime.Goexit()
		case "panics":
			panic("out of order")
		}
		done++
		return nil
	})
	bubble(t, p, inboxtest.Config{}, func(t *testing.T, b rig, _ func()) {
		publish(t, b, "exits", "panics", "fine")
		idle(t, b)
		dead := letters(t, b, inbox.Filter{Class: driver.ClassDefault})
		if len(dead) != 2 || dead[0].Attempts != 6 || dead[1].Attempts != 6 || done != 1 {
			t.Errorf("dead letters = %+v, done = %d", dead, done)
		}
		if err := b.Ready(t.Context()); err != nil {
			t.Errorf("Ready = %v", err)
		}
	})
}
