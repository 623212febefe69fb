package conformance

import (
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// measures follows messages through the states that driver.Depth counts.
func measures(t *testing.T, s Store) {
	source, ok := s.Source.(driver.Measured)
	if !ok {
		return
	}
	wants := func(when string, ready, parked, dead int, aged bool) {
		t.Helper()
		got, err := source.Depth(t.Context())
		if err != nil {
			t.Fatalf("Stats: %v", err)
		}
		if got.Ready != ready || got.Parked != parked || got.Dead != dead || got.OldestAge > 0 != aged || got.OldestAge > time.Hour {
			t.Errorf("%s: %+v, want %d ready, %d parked, %d dead, aged %v", when, got, ready, parked, dead, aged)
		}
	}
	wants("empty", 0, 0, 0, false)
	later := message("later", "x")
	later.NotBefore = time.Now().Add(time.Hour)
	s.write(t, later)
	time.Sleep(time.Millisecond)
	wants("for later", 0, 1, 0, false)

	s.write(t, message("a", "1"), message("a", "2"), message("b", "3"))
	time.Sleep(time.Millisecond)
	wants("written", 3, 1, 0, true)
	claimed := s.claim(t, driver.Claim{})
	wants("claimed", 3, 1, 0, true)
	if got, err := source.Depth(t.Context()); err != nil || got.Stored < 4 || got.Leased != len(claimed.Leases) || got.Doubtful != 0 {
		t.Errorf("%+v, %v, want at least 4 stored and %d lanes leased", got, err, len(claimed.Leases))
	}
	first := claimed.Messages[0]
	failed := outcomes(driver.Failed, first)
	failed[0].Delay = time.Minute
	s.settle(t, claimed, failed...)
	wants("one failed", 2, 2, 0, true)
	dead := s.claim(t, driver.Claim{})
	s.settle(t, dead, outcomes(driver.Dead, dead.Messages...)...)
	n := int(len(dead.Messages)) // the message behind the failed one was not claimed
	wants("the others dead", 2-n, 2, n, true)
}

// What waits behind a message for later is late all the same: an alert on the age must see it.
func measuresHeldMessages(t *testing.T, s Store) {
	source, ok := s.Source.(driver.Measured)
	if !ok {
		return
	}
	later := message("k", "1")
	later.NotBefore = time.Now().Add(time.Hour)
	s.write(t, later)
	s.write(t, message("k", "2"), message("k", "3"))
	time.Sleep(time.Millisecond)
	for _, when := range []string{"before a claim", "after a claim"} {
		stats, err := source.Depth(t.Context())
		must(t, err)
		if stats.Ready != 2 || stats.Parked != 1 || stats.OldestAge <= 0 || stats.OldestAge > 30*time.Minute {
			t.Errorf("%s: %+v", when, stats)
		}
		s.wantReady(t)
	}
}

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
