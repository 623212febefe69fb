package conformance

import (
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

func (s Store) renew(t *testing.T, b driver.Batch, ttl time.Duration) (stale []driver.Lease) {
	t.Helper()
	stale, err := s.Source.Renew(t.Context(), b.Leases, ttl)
	if err != nil {
		t.Fatalf("Renew: %v", err)
	}
	return stale
}

func renewsLeases(t *testing.T, s Store) {
	s.write(t, message("k", "1"))
	const short = 300 * time.Millisecond
	b := s.claim(t, driver.Claim{Lease: short})
	claimed := time.Now()
	if stale := s.renew(t, b, lease); len(stale) > 0 {
		t.Errorf("stale are %v", stale)
	}
	eventually(t, func() string {
		if other := s.claimAlone(t, driver.Claim{}); len(other.Messages) > 0 {
			t.Fatalf("claimed %v beside a lease that was renewed", bodies(other))
		}
		if time.Since(claimed) < 2*short { // timing: waits until a short lease is over
			return "the first lease is not long over"
		}
		return ""
	})
	if stale := s.settle(t, b, outcomes(driver.Published, b.Messages...)...); len(stale) > 0 {
		t.Errorf("settled with %v stale", stale)
	}
	s.wantReady(t)
	if _, err := s.Source.Renew(t.Context(), b.Leases, 0); err == nil {
		t.Error("a renewal for no time was accepted")
	}
}

func renewsNoStaleLease(t *testing.T, s Store) {
	s.write(t, message("k", "1"))
	paused := s.claim(t, driver.Claim{Lease: 10 * time.Millisecond})
	claimed := time.Now()
	eventually(t, func() string {
		if time.Since(claimed) < 50*time.Millisecond { // timing: waits until a short lease is over
			return "the lease is not long over"
		}
		return ""
	})
	if stale := s.renew(t, paused, 10*time.Millisecond); len(stale) > 0 {
		t.Errorf("stale are %v, and nobody has taken the lane", stale)
	}
	second := s.claimLate(t, driver.Claim{})
	if stale := s.renew(t, paused, lease); !slices.Equal(stale, paused.Leases) {
		t.Errorf("stale are %v, want %v", stale, paused.Leases)
	}
	if stale := s.renew(t, second, lease); len(stale) > 0 {
		t.Errorf("the holder is stale: %v", stale)
	}
	s.settle(t, second)
	if stale := s.renew(t, second, lease); !slices.Equal(stale, second.Leases) {
		t.Errorf("after Settle stale are %v, want %v", stale, second.Leases)
	}
}

// lose claims and never settles, as a relay that was killed.
func (s Store) lose(t *testing.T, limit int) driver.Batch {
	t.Helper()
	return s.claimLate(t, driver.Claim{Limit: limit, Lease: 100 * time.Millisecond})
}

func suspectsTheLost(t *testing.T, s Store) {
	// Keys a and b lie in different lanes.
	for i := range 20 {
		s.write(t, message("a", strconv.Itoa(i)))
	}
	s.lose(t, 16)
	s.write(t, message("b", "sound"))
	eventually(t, func() string {
		b := s.claim(t, driver.Claim{})
		defer s.settle(t, b)
		if slices.ContainsFunc(b.Messages, func(m driver.Message) bool { return m.Key == "a" }) {
			t.Fatal("messages under suspicion were given to a relay that is not alone")
		}
		if !b.Suspect {
			return "the relay is not told of messages under suspicion"
		}
		return ""
	})
	s.settleSound(t)
	for sent := 0; sent < 20; { // 16 in batches of 2, and the rest
		b := s.claimAlone(t, driver.Claim{Limit: 16})
		want := 2
		if sent == 16 {
			want = 4
		}
		if len(b.Messages) != want || b.Suspect != (sent < 16) || b.Unsettled != 0 {
			t.Fatalf("after %d: %d messages, suspect %v, unsettled %d", sent, len(b.Messages), b.Suspect, b.Unsettled)
		}
		if b.Messages[0].Attempts != 0 {
			t.Error("suspicion cost an attempt")
		}
		s.settle(t, b, outcomes(driver.Published, b.Messages...)...)
		sent += len(b.Messages)
	}
	s.wantReady(t)
}

// settleSound publishes what is not under suspicion.
func (s Store) settleSound(t *testing.T) {
	t.Helper()
	b := s.claim(t, driver.Claim{})
	s.settle(t, b, outcomes(driver.Published, b.Messages...)...)
}

// A message of a transport that a claim skips may have been in the lost batch, so it stays under suspicion.
func suspectsTheSkipped(t *testing.T, s Store) {
	skipped, other := message("a", "skipped"), message("a", "other")
	skipped.Transport = "away"
	s.write(t, skipped, other)
	s.lose(t, 16)
	b := s.claimLate(t, driver.Claim{Limit: 16, Skip: []string{"away"}})
	if !b.Suspect || len(b.Messages) != 1 || string(b.Messages[0].Body) != `"other"` {
		t.Fatalf("%v, suspect %v, want the other one under suspicion", bodies(b), b.Suspect)
	}
	s.settle(t, b, outcomes(driver.Published, b.Messages...)...)
	if b = s.claim(t, driver.Claim{}); len(b.Messages) > 0 || !b.Suspect {
		t.Errorf("a relay that is not alone was given %v, suspect %v", bodies(b), b.Suspect)
	}
	b = s.claimAlone(t, driver.Claim{Limit: 16})
	if !b.Suspect || len(b.Messages) != 1 {
		t.Errorf("a relay that is alone was given %v, suspect %v", bodies(b), b.Suspect)
	}
	s.settle(t, b, outcomes(driver.Published, b.Messages...)...)
	s.wantReady(t)
}

func countsLosses(t *testing.T, s Store) {
	for i := range 10 {
		s.write(t, message("k", strconv.Itoa(i)))
	}
	for _, want := range []int{8, 1, 1, 1} {
		b := s.lose(t, 8)
		if len(b.Messages) != want {
			t.Fatalf("%d messages, want %d", len(b.Messages), want)
		}
	}
	b := s.lose(t, 8)
	if len(b.Messages) != 1 || b.Unsettled != 3 || !b.Suspect || string(b.Messages[0].Body) != `"0"` {
		t.Fatalf("%v, unsettled %d, suspect %v, want the first, lost 3 times", bodies(b), b.Unsettled, b.Suspect)
	}
	s.settle(t, b, outcomes(driver.Dead, b.Messages...)...)
	if b = s.claimAlone(t, driver.Claim{Limit: 8}); len(b.Messages) == 0 || b.Unsettled != 0 || string(b.Messages[0].Body) != `"1"` {
		t.Errorf("the key goes on with %v, unsettled %d", bodies(b), b.Unsettled)
	}
}

// A relay that gave the message back has survived it: losses count in a row only.
func countsLossesInARow(t *testing.T, s Store) {
	s.write(t, message("k", "0"))
	for range 3 { // the first makes a suspect of it
		s.lose(t, 1)
	}
	b := s.lose(t, 1)
	if b.Unsettled == 0 {
		t.Fatal("no loss is counted")
	}
	b = s.claimLate(t, driver.Claim{Limit: 1})
	s.settle(t, b)
	if b = s.claimAlone(t, driver.Claim{Limit: 1}); len(b.Messages) != 1 || b.Unsettled != 0 {
		t.Errorf("%v, unsettled %d after it was given back", bodies(b), b.Unsettled)
	}
}
