package inboxpgx_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A pause is known to all Stores of its consumer, those of other processes included, and to no other consumer.
func TestPause(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	manager := newManager(t, pool)
	here, there := newStore(t, manager, "a", inboxpgx.Config{}), newStore(t, manager, "a", inboxpgx.Config{})
	checkPause(t, here, there)
	noError(t, here.Pause(t.Context(), "ada", "a test"))
	if p, err := newStore(t, manager, "b", inboxpgx.Config{}).Paused(t.Context()); err != nil || p != (driver.Pause{}) {
		t.Errorf("another consumer: %+v, %v", p, err)
	}
}

func TestPauseInMemory(t *testing.T) {
	t.Parallel()
	s, _ := fakeStore(t)
	checkPause(t, s, s)
}

// checkPause pauses and resumes one Store, and has another one tell.
func checkPause(t *testing.T, s, other *inboxpgx.Store) {
	t.Helper()
	told := make(chan driver.Pause, 10)
	ctx, stop := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { other.WatchPause(ctx, func(p driver.Pause) { told <- p }) })
	defer watching.Wait()
	defer stop()
	wants := func(by, reason string) (since time.Time) {
		t.Helper()
		select {
		case p := <-told:
			kept, err := s.Paused(t.Context())
			if err != nil || p != kept || p.By != by || p.Reason != reason || p.Since.IsZero() != (by == "") {
				t.Errorf("told %+v, kept %+v, %v, want %q, %q", p, kept, err, by, reason)
			}
			return p.Since
		case <-time.After(testenv.Patience):
			t.Fatal("nothing is told")
			return time.Time{}
		}
	}
	wants("", "")
	noError(t, s.Pause(t.Context(), "ada", "the bank is down"))
	since := wants("ada", "the bank is down")
	noError(t, s.Pause(t.Context(), "bob", ""))
	if again := wants("bob", ""); !again.Equal(since) {
		t.Errorf("it began at %v, and then at %v", since, again)
	}
	for range 2 {
		noError(t, s.Resume(t.Context()))
	}
	wants("", "")
	for _, wrong := range [][2]string{{"", "x"}, {"a\nb", "x"}, {"a", strings.Repeat("x", 1001)}} {
		if err := s.Pause(t.Context(), wrong[0], wrong[1]); err == nil {
			t.Errorf("paused by %q for %.10q", wrong[0], wrong[1])
		}
	}
	if p, err := s.Paused(t.Context()); err != nil || p != (driver.Pause{}) {
		t.Errorf("paused %+v, %v", p, err)
	}
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
