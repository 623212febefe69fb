package conformance

import (
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// TestParking holds a driver.Parking to what it promises. newParkings returns one per consumer, all
// in the same place, without messages.
func TestParking(t *testing.T, newParkings func(t *testing.T) func(consumer string) driver.Parking) {
	for name, test := range map[string]func(*testing.T, parkingTester){
		"order":            testParkingOrder,
		"keeps all":        testParkingKeepsAll,
		"stopped again":    testParkingStopsAgain,
		"a follower stops": testParkingStopsFollower,
		"late copies":      testParkingLateCopies,
		"drop":             testParkingDrop,
		"heads":            testParkingHeads,
		"letters":          testParkingLetters,
		"replays at once":  testParkingReplaysAtOnce,
		"edited":           testParkingEdited,
		"odd time stamps":  testParkingOddTimes,
		"claims":           testParkingClaims,
		"claims that end":  testParkingClaimsThatEnd,
		"late owners":      testParkingLateOwners,
		"claims at once":   testParkingClaimsAtOnce,
		"count":            testParkingCount,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			parkings := newParkings(t)
			test(t, parkingTester{parkings("a"), parkings("b"), ids.New()})
		})
	}
}

type parkingTester struct {
	driver.Parking
	other driver.Parking // of another consumer
	owner uuid.UUID      // of what is claimed, where a test names none
}

// claim claims for long what is first of a key.
func (p parkingTester) claim(t *testing.T, key string) (m *inbox.Message, there bool) {
	t.Helper()
	m, there, err := p.Claim(t.Context(), key, driver.Lease{Owner: p.owner, For: time.Hour})
	if err != nil || m != nil && !there {
		t.Fatalf("Claim: %v, %v, %v", m, there, err)
	}
	return m, there
}

// queued is a message of the suite that has come from a queue.
func queued(number int) *inbox.Message {
	m := event(number)
	m.Queue = "orders"
	return m
}

func (p parkingTester) stop(t *testing.T, key string, m *inbox.Message, err error) inbox.DeadLetter {
	t.Helper()
	dead := driver.NewDeadLetter(m, driver.Classify(err), "suite", time.Now().Truncate(time.Microsecond))
	if err := p.Stop(t.Context(), key, dead); err != nil {
		t.Fatalf("Stop: %v", err)
	}
	return dead
}

func (p parkingTester) fail(t *testing.T, m *inbox.Message, err error) inbox.DeadLetter {
	t.Helper()
	dead := driver.NewDeadLetter(m, driver.Classify(err), "suite", time.Now().Truncate(time.Microsecond))
	if err := p.Fail(t.Context(), p.owner, dead); err != nil {
		t.Fatalf("Fail: %v", err)
	}
	return dead
}

func (p parkingTester) add(t *testing.T, key string, msgs ...*inbox.Message) {
	t.Helper()
	for _, m := range msgs {
		if err := p.Append(t.Context(), key, m); err != nil {
			t.Fatalf("Append: %v", err)
		}
	}
}

func (p parkingTester) done(t *testing.T, m *inbox.Message) {
	t.Helper()
	if err := p.Done(t.Context(), p.owner, m); err != nil {
		t.Fatalf("Done: %v", err)
	}
}

// returned is a message that was returned so often.
func returned(m *inbox.Message, replays int) *inbox.Message {
	again := *m
	again.Replays = replays
	return &again
}

// letters are the dead letters as users work with them.
func (p parkingTester) letters() inbox.DeadLetters {
	return driver.NewDeadLetters(p, driver.DefaultRetention, slog.New(slog.DiscardHandler))
}

func (p parkingTester) replay(t *testing.T, f inbox.Filter, want int) {
	t.Helper()
	if got, err := p.letters().Replay(t.Context(), f, inbox.Replay{By: "suite"}); got.Returned != want || err != nil {
		t.Fatalf("Replay: %+v, error %v, want %d", got, err, want)
	}
}

// wantFirst wants the next message of a key; nil for none.
func (p parkingTester) wantFirst(t *testing.T, key string, want *inbox.Message) {
	t.Helper()
	got, _ := p.claim(t, key)
	switch {
	case got == nil && want == nil:
	case got == nil || want == nil:
		t.Fatalf("first is %+v, want %+v", got, want)
	case got.ID != want.ID:
		t.Fatalf("first is another message than wanted")
	}
}

func (p parkingTester) wantHeads(t *testing.T, want ...driver.Head) {
	t.Helper()
	got, err := p.Heads(t.Context(), "", 100)
	if err != nil || !slices.Equal(got, want) {
		t.Fatalf("Heads: %v, error %v, want %v", got, err, want)
	}
}

var errNo = errors.New("no")

// What comes behind a dead letter waits in its order, each message once.
func testParkingOrder(t *testing.T, p parkingTester) {
	first, second, third, apart := queued(1), queued(2), queued(3), queued(4)
	p.wantHeads(t)
	p.wantFirst(t, "k", nil)
	p.stop(t, "k", first, errNo)
	p.add(t, "k", first, second, third, second)
	p.stop(t, "l", apart, errNo)
	p.wantHeads(t, driver.Head{Key: "k", Stopped: true}, driver.Head{Key: "l", Stopped: true})
	p.wantFirst(t, "k", nil)
	parkingTester{Parking: p.other}.wantHeads(t)
	p.replay(t, inbox.Filter{Name: Name, Limit: 1}, 1)
	p.wantHeads(t, driver.Head{Key: "k"}, driver.Head{Key: "l", Stopped: true})
	for _, m := range []*inbox.Message{returned(first, 1), second, third} {
		p.wantFirst(t, "k", m)
		p.wantFirst(t, "k", m)
		p.done(t, m)
		p.done(t, m)
	}
	p.wantFirst(t, "k", nil)
	p.wantHeads(t, driver.Head{Key: "l", Stopped: true})
	for key, want := range map[string]bool{"k": false, "l": true} {
		if _, there := p.claim(t, key); there != want {
			t.Errorf("key %s: there %v", key, there)
		}
	}
}

// Messages and dead letters come back as they were; what was returned was never tried.
func testParkingKeepsAll(t *testing.T, p parkingTester) {
	at := time.Now().UTC().Add(-time.Hour).Truncate(time.Second).Add(678 * time.Microsecond) // recent enough for a replay
	m := queued(1)
	m.Key, m.PublishedAt, m.ContentType = "\x7fkey \"ä\"", at, "application/x+json"
	m.Headers = map[string]string{"tenant": "a\u0000b", "ä": ""}
	m.Body = []byte("\x00\xff")
	follower := *queued(2)
	follower.Body, follower.Headers = nil, nil
	failed := *m
	failed.Attempt, failed.Recovered, failed.Replays, failed.FirstFailedAt = 6, 2, 3, at
	failed.History = []inbox.FailedAttempt{{At: at, Error: "at first", Consumer: "suite"}}
	want := p.stop(t, m.Key, &failed, fmt.Errorf("open: %w", errNo))
	p.add(t, m.Key, &follower)
	got, err := p.letters().Show(t.Context(), m.ID)
	if err != nil || !reflect.DeepEqual(utc(got), utc(want)) {
		t.Fatalf("the dead letter is\n%+v, error %v, want\n%+v", got, err, want)
	}
	p.replay(t, inbox.Filter{}, 1)
	m.Replays = 4
	for _, want := range []*inbox.Message{m, &follower} {
		got, _ := p.claim(t, m.Key)
		if got == nil {
			t.Fatal("nothing is first")
		}
		if len(got.Body) == 0 {
			got.Body = want.Body
		}
		back, sent := utc(inbox.DeadLetter{Message: *got}), utc(inbox.DeadLetter{Message: *want})
		if !reflect.DeepEqual(back, sent) {
			t.Errorf("the message is\n%+v, want\n%+v", back.Message, sent.Message)
		}
		p.done(t, want)
	}
}

// utc has times in one zone, so that they can be compared.
func utc(d inbox.DeadLetter) inbox.DeadLetter {
	d.FirstFailedAt, d.FailedAt = d.FirstFailedAt.UTC(), d.FailedAt.UTC()
	d.Message.FirstFailedAt, d.Message.PublishedAt = d.Message.FirstFailedAt.UTC(), d.Message.PublishedAt.UTC()
	d.Message.History = slices.Clone(d.Message.History)
	for i := range d.Message.History {
		d.Message.History[i].At = d.Message.History[i].At.UTC()
	}
	return d
}

// Senders set their own time stamps: milliseconds where seconds are meant are the year 55840. What a
// Parking cannot keep of them it leaves out, but it takes the message.
func testParkingOddTimes(t *testing.T, p parkingTester) {
	first, second := queued(1), queued(2)
	first.PublishedAt = time.Unix(1_700_000_000_000, 0)
	second.PublishedAt = time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("", 24*60*60))
	first.FirstFailedAt = first.PublishedAt
	first.History = []inbox.FailedAttempt{{At: first.PublishedAt, Error: "at first", Consumer: "suite"}}
	p.stop(t, "k", first, errNo)
	p.add(t, "k", second)
	p.replay(t, inbox.Filter{}, 1)
	p.wantFirst(t, "k", first)
	p.done(t, returned(first, 1))
	p.wantFirst(t, "k", second)
}

// A message that fails once more stops its key in its place.
func testParkingStopsAgain(t *testing.T, p parkingTester) {
	first, second := queued(1), queued(2)
	p.stop(t, "k", first, errNo)
	p.add(t, "k", second)
	for round := 1; round <= 3; round++ {
		p.replay(t, inbox.Filter{}, 1)
		m, _ := p.claim(t, "k")
		if m == nil || m.ID != first.ID || m.Replays != round || m.Attempt != 1 {
			t.Fatalf("round %d: %+v", round, m)
		}
		p.fail(t, m, fmt.Errorf("again"))
		p.wantHeads(t, driver.Head{Key: "k", Stopped: true})
		p.wantFirst(t, "k", nil)
	}
	p.replay(t, inbox.Filter{ErrorContains: "again"}, 1)
	p.wantFirst(t, "k", first)
	p.done(t, returned(first, 4))
	p.wantFirst(t, "k", second)
}

// So does one that came behind.
func testParkingStopsFollower(t *testing.T, p parkingTester) {
	first, second, third := queued(1), queued(2), queued(3)
	p.stop(t, "k", first, errNo)
	p.add(t, "k", second, third)
	p.replay(t, inbox.Filter{}, 1)
	p.wantFirst(t, "k", first)
	p.done(t, returned(first, 1))
	p.stop(t, "k", second, inbox.Classed(errNo, "payment"))
	p.wantHeads(t, driver.Head{Key: "k", Stopped: true})
	if n, err := p.letters().Count(t.Context(), inbox.Filter{Class: "payment"}); n != 1 || err != nil {
		t.Fatalf("%d dead letters of class payment, error %v", n, err)
	}
	p.replay(t, inbox.Filter{Class: "payment"}, 1)
	p.wantFirst(t, "k", second)
	p.done(t, returned(second, 1))
	p.wantFirst(t, "k", third)
}

// Copies from before a replay, of a consumer that was slow, change nothing.
func testParkingLateCopies(t *testing.T, p parkingTester) {
	first := queued(1)
	p.stop(t, "k", first, errNo)
	p.replay(t, inbox.Filter{}, 1)
	p.stop(t, "k", first, errNo)
	p.add(t, "k", first)
	p.done(t, first)
	if m, _ := p.claim(t, "k"); m == nil || m.Replays != 1 {
		t.Fatalf("%+v", m)
	}
	p.done(t, first)
	dead := p.fail(t, returned(first, 1), fmt.Errorf("again"))
	late := dead
	late.Error = "too late"
	noError(t, p.Stop(t.Context(), "k", late))
	if got, err := p.letters().Show(t.Context(), first.ID); err != nil || got.Error != "again" {
		t.Errorf("%+v, error %v", got, err)
	}
}

func testParkingDrop(t *testing.T, p parkingTester) {
	first, second := queued(1), queued(2)
	p.stop(t, "k", first, errNo)
	p.add(t, "k", second)
	if n, err := p.letters().Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "suite"}); n != 1 || err != nil {
		t.Fatalf("removed %d, error %v", n, err)
	}
	p.wantHeads(t, driver.Head{Key: "k"})
	p.wantFirst(t, "k", second)
	if n, err := p.letters().Count(t.Context(), inbox.Filter{}); n != 0 || err != nil {
		t.Errorf("%d dead letters, error %v", n, err)
	}
}

// Heads come in pages, however the keys are spelt.
func testParkingHeads(t *testing.T, p parkingTester) {
	want := []driver.Head{{Key: " "}, {Key: "A"}, {Key: "B"}, {Key: "a"}, {Key: "a b", Stopped: true}, {Key: "ab"}, {Key: "ä"}, {Key: "𝄞", Stopped: true}}
	for i, head := range slices.Backward(want) {
		for n := range 3 {
			m := queued(10*i + n)
			if head.Stopped && n == 0 {
				p.stop(t, head.Key, m, errNo)
			} else {
				p.add(t, head.Key, m)
			}
		}
	}
	p.wantHeads(t, want...)
	var all []driver.Head
	for after := ""; ; {
		page, err := p.Heads(t.Context(), after, 3)
		if err != nil || len(page) > 3 {
			t.Fatalf("%d heads of 3, error %v", len(page), err)
		}
		if len(page) == 0 {
			break
		}
		all, after = append(all, page...), page[len(page)-1].Key
	}
	if !slices.Equal(all, want) {
		t.Errorf("in pages %v, want %v", all, want)
	}
}

// Letters are counted and visited by class, the oldest first, and only those that have stopped a key.
func testParkingLetters(t *testing.T, p parkingTester) {
	const n = 25
	var want []*inbox.Message
	for i := range n {
		m := queued(i)
		if i%5 == 0 { // so that one read is not all
			m.Body = []byte(`"` + strings.Repeat("x", 3<<19) + `"`)
		}
		p.stop(t, fmt.Sprint("k", i), m, inbox.Classed(errNo, "payment"))
		p.add(t, fmt.Sprint("k", i), queued(100+i))
		want = append(want, m)
	}
	p.stop(t, "other", queued(n), errNo)
	depths, err := p.Depths(t.Context())
	if err != nil || len(depths) != 2 || depths[0].Class != driver.ClassDefault || depths[1].Class != "payment" || depths[1].Messages != n ||
		depths[1].Oldest.IsZero() || depths[1].Oldest.After(depths[0].Oldest) {
		t.Fatalf("depths %+v, error %v", depths, err)
	}
	visited := 0
	if err := p.Scan(t.Context(), "payment", func(dead *inbox.DeadLetter) (driver.Fate, error) {
		if visited == n {
			t.Fatal("more than were there")
		}
		if dead.Message.ID != want[visited].ID {
			t.Errorf("letter %d is another one", visited)
		}
		visited++
		late := queued(1000 + visited)
		p.stop(t, fmt.Sprint("late", visited), late, inbox.Classed(errNo, "payment"))
		return []driver.Fate{driver.Keep, driver.Drop, driver.Return}[visited%3], nil
	}, func(_ inbox.DeadLetter, err error) { t.Error(err) }); err != nil || visited != n {
		t.Fatalf("visited %d, error %v", visited, err)
	}
	if found, err := p.letters().Count(t.Context(), inbox.Filter{Class: "payment"}); found != n/3+n || err != nil {
		t.Errorf("%d letters afterwards, error %v", found, err)
	}
	enough := 0
	if err := p.Scan(t.Context(), "payment", func(*inbox.DeadLetter) (driver.Fate, error) {
		enough++
		return driver.Drop, driver.ErrDone
	}, func(_ inbox.DeadLetter, err error) { t.Error(err) }); err != nil || enough != 1 {
		t.Errorf("visited %d, error %v", enough, err)
	}
	if err := p.Scan(t.Context(), "payment", func(*inbox.DeadLetter) (driver.Fate, error) { return driver.Drop, errNo },
		func(_ inbox.DeadLetter, err error) { t.Error(err) }); !errors.Is(err, errNo) {
		t.Errorf("error %v", err)
	}
	if found, err := p.letters().Count(t.Context(), inbox.Filter{Class: "payment"}); found != n/3+n || err != nil {
		t.Errorf("%d letters in the end, error %v", found, err)
	}
	noError(t, p.Scan(t.Context(), "", func(*inbox.DeadLetter) (driver.Fate, error) { return driver.Drop, nil }, nil))
}

// A letter that returns has the body that it was given; one that cannot be edited stays.
func testParkingEdited(t *testing.T, p parkingTester) {
	const body = `{"edited":true}`
	stays := p.stop(t, "a", queued(1), errNo).Message.ID
	p.stop(t, "b", queued(2), errNo)
	edit := func(m inbox.Message) ([]byte, error) {
		if m.ID == stays {
			return nil, errNo
		}
		return []byte(body), nil
	}
	got, err := p.letters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "suite", Edit: edit})
	if got != (inbox.Replayed{Returned: 1, Failed: 1}) || !errors.Is(err, errNo) {
		t.Errorf("replayed %+v, error %v", got, err)
	}
	if m, _ := p.claim(t, "b"); m == nil || string(m.Body) != body {
		t.Errorf("claimed %+v", m)
	}
	if left, err := p.letters().List(t.Context(), inbox.Filter{}); err != nil || len(left) != 1 || left[0].Message.ID != stays {
		t.Errorf("left %+v, error %v", left, err)
	}
}

// However many return a letter, it is returned once.
func testParkingReplaysAtOnce(t *testing.T, p parkingTester) {
	const n = 12
	for i := range n {
		p.stop(t, fmt.Sprint("k", i), queued(i), errNo)
	}
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if _, err := p.letters().Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "suite"}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for i := range n {
		if m, _ := p.claim(t, fmt.Sprint("k", i)); m == nil || m.Replays != 1 {
			t.Errorf("%+v", m)
		}
	}
}

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
