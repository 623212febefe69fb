package conformance

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// as is the tester as another owner of the same consumer.
func (p parkingTester) as(owner uuid.UUID) parkingTester {
	p.owner = owner
	return p
}

func (p parkingTester) renew(t *testing.T, d time.Duration, m *inbox.Message) (kept bool) {
	t.Helper()
	held, err := p.Renew(t.Context(), driver.Lease{Owner: p.owner, For: d}, []uuid.UUID{m.ID, ids.New()})
	if err != nil || len(held) > 1 || len(held) == 1 && held[0] != m.ID {
		t.Fatalf("Renew: %v, error %v", held, err)
	}
	return len(held) == 1
}

// A message that one owner has is no other's, and what is behind it neither.
func testParkingClaims(t *testing.T, p parkingTester) {
	first, second, dead := queued(1), queued(2), queued(3)
	late := p.as(ids.New())
	p.add(t, "k", first, second)
	p.stop(t, "l", dead, errNo)
	p.wantFirst(t, "k", first)
	for range 2 {
		if m, there := late.claim(t, "k"); m != nil || !there {
			t.Fatalf("two have %+v, there %v", m, there)
		}
	}
	if late.renew(t, time.Hour, first) || !p.renew(t, time.Hour, first) || p.renew(t, time.Hour, dead) {
		t.Error("not only the owner's claims are renewed")
	}
	p.done(t, first)
	late.wantFirst(t, "k", second)
	p.wantFirst(t, "k", nil)
}

// A claim ends by time or is given up; until another one claims the message its owner may go on.
func testParkingClaimsThatEnd(t *testing.T, p parkingTester) {
	m := queued(1)
	late := p.as(ids.New())
	p.add(t, "k", m)
	if got, _, err := p.Claim(t.Context(), "k", driver.Lease{Owner: p.owner, For: time.Millisecond}); got == nil || err != nil {
		t.Fatalf("%+v, error %v", got, err)
	}
	time.Sleep(10 * time.Millisecond)
	if !p.renew(t, time.Hour, m) {
		t.Error("a claim that nobody else wants is not renewed")
	}
	late.wantFirst(t, "k", nil)
	if !p.renew(t, 0, m) {
		t.Error("the owner has no claim to give up")
	}
	late.wantFirst(t, "k", m)
	if p.renew(t, time.Hour, m) {
		t.Error("a claim is renewed that another one has")
	}
}

// What another owner has is not ended by the one that had it, nor by a copy from the queue.
func testParkingLateOwners(t *testing.T, p parkingTester) {
	m := queued(1)
	late := p.as(ids.New())
	dead := driver.NewDeadLetter(m, driver.Classify(errNo), "suite", time.Now())
	stale := func(what string) {
		t.Helper()
		if err := late.Fail(t.Context(), late.owner, dead); !errors.Is(err, driver.ErrStale) {
			t.Errorf("%s: Fail: %v", what, err)
		}
	}
	p.add(t, "k", m)
	late.wantFirst(t, "k", m)
	late.renew(t, 0, m)
	p.wantFirst(t, "k", m)
	late.done(t, m)
	stale("another has it")
	p.stop(t, "k", m, errNo)
	p.wantHeads(t, driver.Head{Key: "k"})
	p.done(t, m)
	stale("it is done")
	p.wantHeads(t)
	p.add(t, "k", m)
	late.wantFirst(t, "k", m)
	late.fail(t, m, errNo)
	p.replay(t, inbox.Filter{}, 1)
	stale("it is returned")
	if m, _ := p.claim(t, "k"); m == nil || m.Replays != 1 {
		t.Errorf("%+v", m)
	}
}

// However many claim a message, one has it.
func testParkingClaimsAtOnce(t *testing.T, p parkingTester) {
	const n = 12
	for i := range n {
		p.add(t, fmt.Sprint("k", i), queued(i))
	}
	var got atomic.Int32
	var all sync.WaitGroup
	for range 4 {
		owner := ids.New()
		all.Go(func() {
			for i := range n {
				m, there, err := p.Claim(t.Context(), fmt.Sprint("k", i), driver.Lease{Owner: owner, For: time.Hour})
				if !there || err != nil {
					t.Errorf("there %v, error %v", there, err)
				}
				if m != nil {
					got.Add(1)
				}
			}
		})
	}
	all.Wait()
	if got.Load() != n {
		t.Errorf("%d claims of %d messages", got.Load(), n)
	}
}

func testParkingCount(t *testing.T, p parkingTester) {
	want := func(most, n int) {
		t.Helper()
		if got, err := p.Count(t.Context(), most); got != n || err != nil {
			t.Errorf("%d messages, error %v, want %d", got, err, n)
		}
	}
	want(10, 0)
	p.stop(t, "k", queued(1), errNo)
	p.add(t, "k", queued(2), queued(3))
	p.add(t, "l", queued(4))
	want(10, 4)
	want(3, 3)
}
