package faults_test

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// A relay is frozen with lanes in hand for longer than its lease. Another one takes them over; the
// first wakes, may publish once more what it had claimed, and changes nothing in the store: its
// leases are stale.
//
// What it publishes then cannot be prevented, since a broker knows of no leases, and is bounded by
// what it had claimed. Each relay publishes a key from its first message not settled on, without a
// gap, so that such a repeat comes in front of nothing new.
func TestOutboxRelayStopped(t *testing.T) {
	t.Parallel()
	rng := seeded(t)
	s := newStore(t, pgtest.URL(t))
	l := ledger.New()
	c := consume(t, amqptest.New(t).URL, l)
	job := relayJob{Database: s.url, Broker: c.URL, Patience: time.Second, MaxAttempts: 10}
	relays := []*child{spawn(t, "relay", job), spawn(t, "relay", job)}
	stop := s.startLoad(l, rng, 40*time.Millisecond)
	for _, r := range relays {
		r.awaitReady()
	}

	freezes, lanes := scaled(t, 2), 0
	for range freezes {
		untilMore(t, l, 1)
		i := rng.IntN(len(relays))
		frozen := s.freeze(relays[i])
		untilTrue(t, "the other relay has the lanes of the frozen one", func() bool {
			return !slices.ContainsFunc(s.lanes(), func(held heldLane) bool { return slices.Contains(frozen, held) })
		})
		time.Sleep(time.Duration(rng.IntN(1000)) * time.Millisecond)
		lanes += len(frozen)
		relays[i].signal(syscall.SIGCONT)
	}
	stop()
	deeds := s.settle(l)
	stale := 0
	for _, r := range relays {
		var report relayReport
		r.end(&report)
		stale += int(report.Stale)
	}
	c.untilDrained(t)
	t.Logf("%d freezes with %d lanes in hand, %d leases found stale", freezes, lanes, stale)
	v := judge(t, l, deeds, bounds{duplicates: freezes * inFlight, depth: len(deeds)})
	// Not at each freeze: a relay that was frozen in the middle of a call of the store finds that its time is up.
	if stale == 0 && long(t) {
		t.Errorf("none of %d leases was found stale", lanes)
	}
	if v.Duplicates == 0 && long(t) {
		t.Error("no duplicate: the relays were never frozen between a publish and its record")
	}
	s.noDeadLetters()
}

// freeze stops a relay while it holds lanes, and returns these.
func (s *store) freeze(r *child) []heldLane {
	s.t.Helper()
	var frozen []heldLane
	untilTrue(s.t, "a relay is frozen with lanes in hand", func() bool {
		r.signal(syscall.SIGSTOP)
		frozen = s.lanes()
		// The other relay goes on, and its tokens with it.
		for _, pause := range []time.Duration{200 * time.Millisecond, time.Second} {
			if len(frozen) == 0 {
				break
			}
			time.Sleep(pause)
			now := s.lanes()
			frozen = slices.DeleteFunc(frozen, func(h heldLane) bool { return !slices.Contains(now, h) })
		}
		if len(frozen) == 0 {
			r.signal(syscall.SIGCONT)
		}
		return len(frozen) > 0
	})
	return frozen
}

// heldLane is a lane with the token of the claim that holds it.
type heldLane struct {
	lane  int
	token string
}

// lanes are those that a relay holds.
func (s *store) lanes() []heldLane {
	s.t.Helper()
	rows, _ := s.pool.Query(s.t.Context(), `SELECT lane, token::text FROM holdfast_outbox_lanes WHERE token IS NOT NULL`) // CollectRows returns its error
	lanes, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (h heldLane, err error) {
		return h, row.Scan(&h.lane, &h.token)
	})
	must(s.t, err)
	return lanes
}
