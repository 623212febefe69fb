package conformance

import (
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// A pause lets what is claimed end, keeps the rest, and is over once it is ended. Sources that cannot be paused pass.
func pauses(t *testing.T, s Store) {
	p, ok := s.Source.(driver.Pausable)
	if !ok {
		return
	}
	s.write(t, message("k", "1"), message("k", "2"))
	claimed := s.claim(t, driver.Claim{Limit: 1})
	began := time.Now()
	for _, reason := range []string{"", "the consumer is down"} {
		must(t, p.Pause(t.Context(), "ada", reason))
		wantPause(t, p, driver.Pause{By: "ada", Reason: reason})
	}
	s.settle(t, claimed, outcomes(driver.Published, claimed.Messages...)...)
	s.write(t, message("", "3"))
	if b := s.claim(t, driver.Claim{}); len(b.Messages) > 0 || b.More {
		t.Errorf("claimed %v in a pause, more %v", bodies(b), b.More)
	}
	if state, err := p.Paused(t.Context()); err != nil || state.Since.Sub(began).Abs() > time.Minute {
		t.Errorf("paused since %v, which began at %v: %v", state.Since, began, err)
	}
	for _, wrong := range [][2]string{{"", "x"}, {"a\nb", "x"}, {strings.Repeat("a", 129), "x"}, {"\xff", "x"}, {"a", strings.Repeat("x", 1001)}} {
		if err := p.Pause(t.Context(), wrong[0], wrong[1]); err == nil {
			t.Errorf("paused by %.20q for %.20q", wrong[0], wrong[1])
		}
	}
	for range 2 {
		must(t, p.Resume(t.Context()))
		wantPause(t, p, driver.Pause{})
	}
	s.wantReady(t, quoted("2", "3")...)
}

func wantPause(t *testing.T, p driver.Pausable, want driver.Pause) {
	t.Helper()
	state, err := p.Paused(t.Context())
	if err != nil || state.By != want.By || state.Reason != want.Reason || state.Since.IsZero() != (want.By == "") {
		t.Errorf("paused %+v, %v, want %+v", state, err, want)
	}
}
