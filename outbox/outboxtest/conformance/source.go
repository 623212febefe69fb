package conformance

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/trace/lanes"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// TestSource checks the contract of driver.Source.
func TestSource(t *testing.T, b Backend) {
	for name, fn := range map[string]func(*testing.T, Store){
		"an empty store returns an empty batch":  func(t *testing.T, s Store) { s.wantReady(t) },
		"a key is in stored order":               keepsOrder,
		"a limit is kept":                        keepsLimit,
		"a leased lane is not claimed":           leasesExclude,
		"concurrent claims share the work":       claimsSideBySide,
		"unsettled messages are released":        givesBack,
		"a failed message waits with its key":    parksFailed,
		"after a dead message its key continues": buriesDead,
		"a message may become dead again":        buriesAgain,
		"a skipped transport is not claimed":     skipsTransports,
		"an expired lease is fenced":             fencesStaleLease,
		"half of a batch is fenced":              fencesHalfABatch,
		"a lease is renewed":                     renewsLeases,
		"a lost lease is not renewed":            renewsNoStaleLease,
		"lost claims make suspects":              suspectsTheLost,
		"skipped messages stay suspects":         suspectsTheSkipped,
		"a message that is lost is counted":      countsLosses,
		"losses count in a row":                  countsLossesInARow,
		"a batch is settled once":                settlesOnce,
		"foreign ids are ignored":                ignoresForeign,
		"Settle reports more messages":           tellsOfMore,
		"Claim reports more messages":            tellsOfOtherLanes,
		"the end of a lease is reported":         tellsLeaseEnd,
		"bad requests are refused":               refusesBadRequests,
		"the depth of the store is measured":     measures,
		"held messages count for the age":        measuresHeldMessages,
		"a pause stops claims":                   pauses,
	} {
		each(t, b.Bubble, name, func(t *testing.T) {
			s, log := recorded(b.Open(t))
			fn(t, s)
			if err := log.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// recorded returns a store with a record of its calls, which must be a run of the model of lanes.
func recorded(s Store) (Store, *lanes.Log) {
	log := lanes.New(false)
	s.Source = log.Process().Source(s.Source)
	inTx := s.InTx
	s.InTx = func(ctx context.Context, fn func(write func(...outbox.Message) error) error) error {
		return log.Commit(func(begin func(), wrote func(...driver.Message)) error {
			return inTx(ctx, func(write func(...outbox.Message) error) error {
				begin()
				return fn(func(msgs ...outbox.Message) error {
					for _, m := range msgs {
						if m.ID != uuid.Nil {
							wrote(driver.Message{ID: m.ID, Key: m.Key})
						}
					}
					return write(msgs...)
				})
			})
		})
	}
	return s, log
}

func keepsOrder(t *testing.T, s Store) {
	var want []string
	for i := range 50 {
		body := strconv.Itoa(i)
		want = append(want, strconv.Quote(body))
		s.write(t, message("k", body), message("", "x"))
	}
	var got []string
	for b := s.claim(t, driver.Claim{}); len(b.Messages) > 0; b = s.claim(t, driver.Claim{}) {
		for _, m := range b.Messages {
			if m.Key == "k" {
				got = append(got, string(m.Body))
			}
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("claimed as %v", got)
	}
}

func keepsLimit(t *testing.T, s Store) {
	for range 20 {
		s.write(t, message("k", "1"))
	}
	if n := len(s.claim(t, driver.Claim{Limit: 3}).Messages); n == 0 || n > 3 {
		t.Errorf("%d messages for a limit of 3", n)
	}
}

func leasesExclude(t *testing.T, s Store) {
	s.write(t, message("k", "1"), message("k", "2"))
	first := s.claim(t, driver.Claim{Limit: 1})
	s.write(t, message("k", "3"))
	if second := s.claim(t, driver.Claim{}); len(second.Messages) > 0 {
		t.Errorf("claimed %v from a leased lane", bodies(second))
	}
	if stale := s.settle(t, first, outcomes(driver.Published, first.Messages...)...); len(stale) > 0 {
		t.Errorf("stale: %v", stale)
	}
	s.wantReady(t, quoted("2", "3")...)
}

func claimsSideBySide(t *testing.T, s Store) {
	const n = 400
	var msgs []outbox.Message
	for i := range n {
		msgs = append(msgs, message("k"+strconv.Itoa(i), strconv.Itoa(i)))
	}
	s.write(t, msgs...)
	var mu sync.Mutex
	seen := map[string]int{}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				b, err := s.Source.Claim(t.Context(), driver.Claim{Limit: 20, Lease: lease})
				if err != nil {
					t.Errorf("Claim: %v", err)
					return
				}
				mu.Lock()
				for _, body := range bodies(b) {
					seen[body]++
				}
				done := len(seen) == n
				mu.Unlock()
				if settled, err := s.Source.Settle(t.Context(), b, outcomes(driver.Published, b.Messages...)); err != nil || len(settled.Stale) > 0 {
					t.Errorf("Settle: stale %v, %v", settled.Stale, err)
					return
				}
				if done {
					return
				}
			}
		})
	}
	wg.Wait()
	for body, times := range seen {
		if times != 1 {
			t.Errorf("%s was claimed %d times", body, times)
		}
	}
	s.wantReady(t)
}

func givesBack(t *testing.T, s Store) {
	s.write(t, message("k", "1"), message("k", "2"), message("k", "3"))
	b := s.claim(t, driver.Claim{})
	s.settle(t, b, outcomes(driver.Published, b.Messages[0])...)
	b = s.claim(t, driver.Claim{})
	if b.Due != 0 {
		t.Errorf("a message is due in %v, and none is parked", b.Due)
	}
	if got := bodies(b); !slices.Equal(got, quoted("2", "3")) || b.Messages[0].Attempts != 0 {
		t.Errorf("released as %v with %d attempts", got, b.Messages[0].Attempts)
	}
}

func parksFailed(t *testing.T, s Store) {
	s.write(t, message("h", "0"))
	b := s.claim(t, driver.Claim{})
	failed := outcomes(driver.Failed, b.Messages[0])
	failed[0].Delay = long
	s.settle(t, b, failed...)
	if due := s.claim(t, driver.Claim{}).Due; due <= 0 || due > long {
		t.Errorf("the next message is due in %v, want the delay of %v", due, long)
	}
	s.write(t, message("h", "behind 0"))
	s.wantReady(t)

	s.write(t, message("k", "1"), message("k", "2"))
	b = s.claim(t, driver.Claim{})
	failed = outcomes(driver.Failed, b.Messages[0])
	failed[0].Delay = short
	s.settle(t, b, failed...)
	s.write(t, message("k", "3"), message("j", "4"))
	eventually(t, func() string {
		b = s.claim(t, driver.Claim{})
		defer s.settle(t, b)
		if slices.Contains(bodies(b), `"1"`) {
			return ""
		}
		if got := bodies(b); !slices.Equal(got, quoted("4")) {
			t.Fatalf("claimed %v while the first message of the key waits", got)
		}
		return "the failed message is not ready"
	})
	s.wantReady(t, quoted("1", "2", "3", "4")...)
	for _, m := range b.Messages {
		want := 0
		if string(m.Body) == `"1"` {
			want = 1
		}
		if m.Attempts != want {
			t.Errorf("%s has %d attempts", m.Body, m.Attempts)
		}
	}
	var keyed []string
	for _, m := range s.claim(t, driver.Claim{}).Messages {
		if m.Key == "k" {
			keyed = append(keyed, string(m.Body))
		}
	}
	if !slices.Equal(keyed, quoted("1", "2", "3")) {
		t.Errorf("the key continues as %v", keyed)
	}
}

func buriesDead(t *testing.T, s Store) {
	s.write(t, message("k", "1"), message("k", "2"))
	b := s.claim(t, driver.Claim{})
	s.settle(t, b, outcomes(driver.Dead, b.Messages[0])...)
	s.wantReady(t, quoted("2")...)
	dead, err := s.DeadLetters.List(t.Context(), outbox.Filter{Whole: true})
	must(t, err)
	if len(dead) != 1 || dead[0].Message.ID != b.Messages[0].ID || dead[0].Attempts != 1 || string(dead[0].Message.Body) != `"1"` {
		t.Errorf("dead letters %+v", dead)
	}
}

// After a message died, its id may be written again, and that message may die too.
func buriesAgain(t *testing.T, s Store) {
	m, err := outbox.NewMessage("order.placed", 1)
	must(t, err)
	for _, body := range []string{"1", "2"} {
		m.Body = []byte(body)
		s.write(t, m)
		b := s.claim(t, driver.Claim{})
		s.settle(t, b, outcomes(driver.Dead, b.Messages...)...)
	}
	dead, err := s.DeadLetters.List(t.Context(), outbox.Filter{Whole: true})
	must(t, err)
	if len(dead) != 1 || dead[0].Message.ID != m.ID || string(dead[0].Message.Body) != "2" {
		t.Errorf("dead letters %+v, want the newer message", dead)
	}
}

func skipsTransports(t *testing.T, s Store) {
	for i := range 20 {
		m := message("", strconv.Itoa(i))
		m.Transport = "down"
		s.write(t, m)
	}
	s.write(t, message("", "good"))
	b := s.claim(t, driver.Claim{Limit: 1, Skip: []string{"down", "other"}})
	if got := bodies(b); !slices.Equal(got, quoted("good")) {
		t.Errorf("claimed %v", got)
	}
}

func fencesStaleLease(t *testing.T, s Store) {
	s.write(t, message("k", "1"), message("k", "2"))
	paused := s.claim(t, driver.Claim{Lease: 300 * time.Millisecond})
	second := s.claimLate(t, driver.Claim{})
	if got := bodies(second); !slices.Equal(got, quoted("1", "2")) {
		t.Errorf("claimed %v after the lease", got)
	}
	stale := s.settle(t, paused, append(outcomes(driver.Published, paused.Messages[0]), outcomes(driver.Dead, paused.Messages[1])...)...)
	if !slices.Equal(stale, paused.Leases) {
		t.Errorf("stale are %v, want %v", stale, paused.Leases)
	}
	if third := s.claim(t, driver.Claim{}); len(third.Messages) > 0 {
		t.Error("a stale settle released the lane of another relay")
	}
	if stale := s.settle(t, second); len(stale) > 0 {
		t.Errorf("the holder is stale: %v", stale)
	}
	s.wantReady(t, quoted("1", "2")...)
}

func settlesOnce(t *testing.T, s Store) {
	s.write(t, message("k", "1"))
	b := s.claim(t, driver.Claim{})
	s.settle(t, b)
	if stale := s.settle(t, b, outcomes(driver.Published, b.Messages...)...); len(stale) != 1 {
		t.Errorf("a second settle has %v stale", stale)
	}
	s.wantReady(t, quoted("1")...)
}

func ignoresForeign(t *testing.T, s Store) {
	// Keys a and b are in different lanes: the holder of one lane can settle nothing of the other.
	a, b := message("a", "1"), message("b", "2")
	if driver.LaneOf(driver.Message{Key: a.Key}) == driver.LaneOf(driver.Message{Key: b.Key}) {
		t.Fatal("the keys share a lane")
	}
	s.write(t, b)
	other := s.claim(t, driver.Claim{})
	s.write(t, a)
	mine := s.claim(t, driver.Claim{})
	if got := bodies(mine); !slices.Equal(got, quoted("1")) {
		t.Fatalf("claimed %v while the other lane is leased", got)
	}
	s.settle(t, mine, outcomes(driver.Published, other.Messages...)...)
	s.settle(t, other)
	s.wantReady(t, quoted("1", "2")...)
}

// Another relay has taken one of two lanes: the batch is settled in the other lane only.
func fencesHalfABatch(t *testing.T, s Store) {
	s.write(t, message("a", "1"), message("b", "2")) // in different lanes
	paused := s.claim(t, driver.Claim{Lease: 300 * time.Millisecond})
	if len(paused.Leases) != 2 {
		t.Fatalf("%d leases, want both lanes", len(paused.Leases))
	}
	second := s.claimLate(t, driver.Claim{})
	if len(second.Messages) != 1 {
		t.Fatalf("claimed %v of the suspect lanes", bodies(second))
	}
	stale := s.settle(t, paused, outcomes(driver.Published, paused.Messages...)...)
	if len(stale) != 1 || stale[0].Lane != second.Leases[0].Lane {
		t.Errorf("stale are %v, want the lane of %v", stale, second.Leases)
	}
	if stale := s.settle(t, second); len(stale) > 0 {
		t.Errorf("the holder is stale: %v", stale)
	}
	s.wantReady(t, bodies(second)...)
}

// A wake-up for a message of a leased lane finds nothing. Settle therefore reports the message to the holder of the
// lane.
func tellsOfMore(t *testing.T, s Store) {
	settle := func(b driver.Batch, want bool) {
		t.Helper()
		settled, err := s.Source.Settle(t.Context(), b, outcomes(driver.Published, b.Messages...))
		if err != nil || len(settled.Stale) > 0 || settled.More != want {
			t.Errorf("Settle returns %+v, %v, want more: %v", settled, err, want)
		}
	}
	s.write(t, message("k", "1"))
	first := s.claim(t, driver.Claim{})
	s.write(t, message("k", "2"))
	settle(first, true)
	settle(s.claim(t, driver.Claim{}), false)
}

// Only Claim can report messages in lanes that it has left.
func tellsOfOtherLanes(t *testing.T, s Store) {
	const n = 64
	for i := range n {
		s.write(t, message("k"+strconv.Itoa(i), "1"))
	}
	for claimed := 0; claimed < n; {
		b, err := s.Source.Claim(t.Context(), driver.Claim{Limit: 1000, Lease: lease})
		if err != nil {
			t.Fatalf("Claim: %v", err)
		}
		if claimed += len(b.Messages); claimed < n && !b.More {
			t.Fatalf("More is false after %d of %d", claimed, n)
		}
	}
}

// The lanes of a killed relay are blocked until its leases end.
func tellsLeaseEnd(t *testing.T, s Store) {
	s.write(t, message("k", "1"))
	const short = time.Minute
	if due := s.claim(t, driver.Claim{Lease: short}).Due; due != 0 {
		t.Errorf("the claim itself returns Due %v", due)
	}
	if due := s.claim(t, driver.Claim{}).Due; due <= 0 || due > short {
		t.Errorf("the lease ends in %v, want up to %v", due, short)
	}
}

func refusesBadRequests(t *testing.T, s Store) {
	for _, req := range []driver.Claim{{Limit: 0, Lease: lease}, {Limit: 1}, {Limit: 1, Lease: -1}} {
		if _, err := s.Source.Claim(t.Context(), req); err == nil {
			t.Errorf("Claim(%+v) was accepted", req)
		}
	}
}

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
	const ttl = 300 * time.Millisecond
	b := s.claim(t, driver.Claim{Lease: ttl})
	claimed := time.Now()
	if stale := s.renew(t, b, lease); len(stale) > 0 {
		t.Errorf("stale are %v", stale)
	}
	eventually(t, func() string {
		if other := s.claimAlone(t, driver.Claim{}); len(other.Messages) > 0 {
			t.Fatalf("claimed %v although the lease was renewed", bodies(other))
		}
		if time.Since(claimed) < 2*ttl { // timing: waits until a short lease is over
			return "the first lease is not long over"
		}
		return ""
	})
	if stale := s.settle(t, b, outcomes(driver.Published, b.Messages...)...); len(stale) > 0 {
		t.Errorf("settled with %v stale", stale)
	}
	s.wantReady(t)
	if _, err := s.Source.Renew(t.Context(), b.Leases, 0); err == nil {
		t.Error("a renewal with a ttl of 0 was accepted")
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

// lose claims and never settles, like a killed relay.
func (s Store) lose(t *testing.T, limit int) driver.Batch {
	t.Helper()
	return s.claimLate(t, driver.Claim{Limit: limit, Lease: 100 * time.Millisecond})
}

func suspectsTheLost(t *testing.T, s Store) {
	// Keys a and b are in different lanes.
	for i := range 20 {
		s.write(t, message("a", strconv.Itoa(i)))
	}
	s.lose(t, 16)
	s.write(t, message("b", "sound"))
	eventually(t, func() string {
		b := s.claim(t, driver.Claim{})
		defer s.settle(t, b)
		if slices.ContainsFunc(b.Messages, func(m driver.Message) bool { return m.Key == "a" }) {
			t.Fatal("suspect messages were returned to a relay that is not alone")
		}
		if !b.Suspect {
			return "suspect messages are not reported"
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

// settleSound publishes the messages that are not suspect.
func (s Store) settleSound(t *testing.T) {
	t.Helper()
	b := s.claim(t, driver.Claim{})
	s.settle(t, b, outcomes(driver.Published, b.Messages...)...)
}

// A message of a skipped transport may have been in the lost batch, so it stays a suspect.
func suspectsTheSkipped(t *testing.T, s Store) {
	skipped, other := message("a", "skipped"), message("a", "other")
	skipped.Transport = "away"
	s.write(t, skipped, other)
	s.lose(t, 16)
	b := s.claimLate(t, driver.Claim{Limit: 16, Skip: []string{"away"}})
	if !b.Suspect || len(b.Messages) != 1 || string(b.Messages[0].Body) != `"other"` {
		t.Fatalf("%v, suspect %v, want the other one as a suspect", bodies(b), b.Suspect)
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
		t.Errorf("the key continues with %v, unsettled %d", bodies(b), b.Unsettled)
	}
}

// A relay that released the message has survived it: only losses in a row count.
func countsLossesInARow(t *testing.T, s Store) {
	s.write(t, message("k", "0"))
	for range 3 { // the first loss makes it a suspect
		s.lose(t, 1)
	}
	b := s.lose(t, 1)
	if b.Unsettled == 0 {
		t.Fatal("no loss is counted")
	}
	b = s.claimLate(t, driver.Claim{Limit: 1})
	s.settle(t, b)
	if b = s.claimAlone(t, driver.Claim{Limit: 1}); len(b.Messages) != 1 || b.Unsettled != 0 {
		t.Errorf("%v, unsettled %d after it was released", bodies(b), b.Unsettled)
	}
}
