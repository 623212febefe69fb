package inboxtest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/ids"
)

func TestDeadLetters(t *testing.T) {
	t.Parallel()
	mended := false
	p := processor(func(_ context.Context, m *inbox.Message) error {
		if mended {
			return nil
		}
		return inbox.Classed(inbox.Unrecoverable(errors.New("no "+m.Name)), "class-"+m.Name)
	})
	bubble(t, p, inboxtest.Config{}, func(t *testing.T, b rig, _ func()) {
		published := publish(t, b, "a", "b", "b", "c")
		idle(t, b)
		dead := b.DeadLetters()
		stats, err := b.Stats(t.Context())
		if err != nil || stats.Waiting+stats.Retrying != 0 || stats.Dead["default"] != 4 || stats.Dead["validation"] != 0 || stats.Held {
			t.Errorf("Stats = %+v, %v; want 4 dead", stats, err)
		}
		if got := letters(t, b, inbox.Filter{Class: "class-b", Limit: 1}); len(got) != 1 || got[0].Message.ID != published[1] {
			t.Errorf("first of class b = %+v", got)
		}
		if got, err := dead.Show(t.Context(), published[3]); err != nil || got.Error != "no c" {
			t.Errorf("Show = %+v, %v", got, err)
		}
		if _, err := dead.Show(t.Context(), ids.New()); !errors.Is(err, inbox.ErrNotFound) {
			t.Errorf("Show of an unknown id = %v", err)
		}
		if n, err := dead.Remove(t.Context(), inbox.Filter{Name: "c"}, inbox.Removal{By: "test"}); n != 1 || err != nil {
			t.Errorf("Remove = %d, %v", n, err)
		}
		if n, err := dead.Remove(t.Context(), inbox.Filter{Limit: -1}, inbox.Removal{By: "test"}); n != 0 || err == nil {
			t.Errorf("Remove with a negative limit = %d, %v", n, err)
		}
		mended = true
		if n, err := dead.Replay(t.Context(), inbox.Filter{Class: "class-b", Limit: 1}, inbox.Replay{By: "test"}); n.Returned != 1 || err != nil {
			t.Errorf("Retry = %+v, %v", n, err)
		}
		idle(t, b)
		if n, err := dead.Replay(t.Context(), inbox.Filter{}, inbox.Replay{DryRun: true}); n.Returned != 2 || err != nil {
			t.Errorf("dry run = %+v, %v", n, err)
		}
		time.Sleep(9 * 24 * time.Hour)
		if n, err := dead.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); n.Outlived != 2 || !errors.Is(err, inbox.ErrOutlived) {
			t.Errorf("after nine days: %+v, %v", n, err)
		}
		left := letters(t, b, inbox.Filter{})
		if len(left) != 2 || left[0].Message.ID != published[0] || left[1].Message.ID != published[2] {
			t.Errorf("left = %+v", left)
		}
		mended = false
		publish(t, b, "d")
		idle(t, b)
		if n, err := dead.Replay(t.Context(), inbox.Filter{Limit: 1}, inbox.Replay{DryRun: true}); n.Returned != 1 || n.Outlived != 2 {
			t.Errorf("a limit of one behind two that stay: %+v, %v", n, err)
		}
	})
}
