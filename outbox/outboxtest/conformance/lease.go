package conformance

import (
	"slices"
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
