package conformance

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	pgxdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/txretry"
)

// TestParking tests the contract of a driver.Parking of inboxpgx.
func TestParking(t *testing.T, b EntriesBackend) {
	for name, test := range map[string]func(*testing.T, parkingTester){
		"order":             testParkingOrder,
		"keeps all":         testParkingKeepsAll,
		"stopped again":     testParkingStopsAgain,
		"a follower stops":  testParkingStopsFollower,
		"late copies":       testParkingLateCopies,
		"processed copies":  testParkingProcessedCopies,
		"drop":              testParkingDrop,
		"letters":           testParkingLetters,
		"replays at once":   testParkingReplaysAtOnce,
		"edited":            testParkingEdited,
		"odd time stamps":   testParkingOddTimes,
		"leases":            testParkingLeases,
		"turns":             testParkingTurns,
		"runs":              testParkingRuns,
		"transactions":      testParkingTransactions,
		"claims at once":    testParkingClaimsAtOnce,
		"arrivals at once":  testParkingArrivalsAtOnce,
		"stops at once":     testParkingStopsAtOnce,
		"keys of all kinds": testParkingKeys,
		"count":             testParkingCount,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := func(t *testing.T) {
				transactor, entries := b.New(t)
				test(t, parkingTester{entries.Parking("a"), entries, transactor, "a"})
			}
			if b.Bubble {
				synctest.Test(t, run)
				return
			}
			run(t)
		})
	}
}

type parkingTester struct {
	pgxdriver.Parking
	entries    pgxdriver.Entries
	transactor txretry.Transactor
	consumer   string
}

// other is the Parking of another consumer.
func (p parkingTester) other() parkingTester {
	return parkingTester{p.entries.Parking("b"), p.entries, p.transactor, "b"}
}

// claim claims a key that may continue; nil for none.
func (p parkingTester) claim(t *testing.T) *pgxdriver.Head {
	t.Helper()
	h, err := p.Claim(t.Context(), time.Hour)
	noError(t, err)
	return h
}

// take runs the message of a head in a transaction that ends with an error, or commits.
func (p parkingTester) take(t *testing.T, h *pgxdriver.Head, end error) (first bool) {
	t.Helper()
	err := p.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) (err error) {
		if first, err = p.Take(ctx, tx, h); err != nil {
			return err
		}
		return end
	})
	if !errors.Is(err, end) || end == nil && err != nil {
		t.Fatalf("Take: %v", err)
	}
	return first
}

// wantNext runs the next message of the key that continues, which must be want, and releases the key.
func (p parkingTester) wantNext(t *testing.T, key string, want *inbox.Message) {
	t.Helper()
	h := p.claim(t)
	if h == nil || h.Key != key || h.Message == nil || h.Message.ID != want.ID || h.Message.Replays != want.Replays {
		t.Fatalf("claimed %+v, want message %v of key %s", h, want.ID, key)
	}
	if !p.take(t, h, nil) {
		t.Fatal("the message is not taken")
	}
	p.end(t, h)
}

// end ends the message of a head, and releases the key.
func (p parkingTester) end(t *testing.T, h *pgxdriver.Head) {
	t.Helper()
	next, err := p.Next(t.Context(), h, time.Hour)
	if next == nil || err != nil {
		t.Fatalf("next is %+v, error %v", next, err)
	}
	noError(t, p.Release(t.Context(), next))
}

// wantFree checks that a key has no messages, and frees it if it may continue.
func (p parkingTester) wantFree(t *testing.T, key string) {
	t.Helper()
	if h := p.claim(t); h != nil {
		if h.Key != key || h.Message != nil {
			t.Fatalf("claimed %+v, want key %s without messages", h, key)
		}
		noError(t, p.Release(t.Context(), h))
	}
	p.wantStopped(t, key, false)
}

func (p parkingTester) wantNone(t *testing.T) {
	t.Helper()
	if h := p.claim(t); h != nil {
		t.Fatalf("claimed %+v", h)
	}
}

// wantStopped checks whether a message of the key gets an entry.
func (p parkingTester) wantStopped(t *testing.T, key string, want bool) {
	t.Helper()
	var first bool
	err := p.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) (err error) {
		first, err = p.entries.Record(ctx, tx, p.consumer, ids.New(), key)
		return errors.Join(err, errAbort)
	})
	if !errors.Is(err, errAbort) || first == want {
		t.Fatalf("key %s: an entry is made: %v, error %v; want stopped %v", key, first, err, want)
	}
}

// queued returns a message of the suite as if received from a queue.
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

func driverLetter(m *inbox.Message, err error) inbox.DeadLetter {
	return driver.NewDeadLetter(m, driver.Classify(err), "suite", time.Now())
}

func (p parkingTester) fail(t *testing.T, h *pgxdriver.Head, err error) inbox.DeadLetter {
	t.Helper()
	dead := driver.NewDeadLetter(h.Message, driver.Classify(err), "suite", time.Now().Truncate(time.Microsecond))
	if err := p.Fail(t.Context(), h, dead); err != nil {
		t.Fatalf("Fail: %v", err)
	}
	return dead
}

func (p parkingTester) add(t *testing.T, key string, msgs ...*inbox.Message) {
	t.Helper()
	for _, m := range msgs {
		if waits, err := p.Wait(t.Context(), key, m, false); !waits || err != nil {
			t.Fatalf("Wait: %v, error %v", waits, err)
		}
	}
}

// returned returns a copy of a message with so many replays.
func returned(m *inbox.Message, replays int) *inbox.Message {
	again := *m
	again.Replays = replays
	return &again
}

// letters returns the dead letters as users see them.
func (p parkingTester) letters() inbox.DeadLetters {
	return driver.NewDeadLetters(p, driver.DefaultRetention, slog.New(slog.DiscardHandler))
}

func (p parkingTester) replay(t *testing.T, f inbox.Filter, want int) {
	t.Helper()
	if got, err := p.letters().Replay(t.Context(), f, inbox.Replay{By: "suite"}); got.Returned != want || err != nil {
		t.Fatalf("Replay: %+v, error %v, want %d", got, err, want)
	}
}

var errNo = errors.New("no")

// Messages behind a dead letter wait in their order, each message once.
func testParkingOrder(t *testing.T, p parkingTester) {
	first, second, third, apart := queued(1), queued(2), queued(3), queued(4)
	p.wantNone(t)
	if waits, err := p.Wait(t.Context(), "k", second, false); waits || err != nil {
		t.Fatalf("Wait of a key that is not stopped: %v, error %v", waits, err)
	}
	p.stop(t, "k", first, errNo)
	p.add(t, "k", first, second, third, second)
	for m, want := range map[*inbox.Message]error{second: nil, apart: pgxdriver.ErrFull} {
		if waits, err := p.Wait(t.Context(), "k", m, true); waits != (want == nil) || !errors.Is(err, want) {
			t.Errorf("Wait with full set: %v, error %v, want %v", waits, err, want)
		}
	}
	if waits, err := p.Wait(t.Context(), "l", apart, true); waits || err != nil {
		t.Errorf("Wait of a key that is not stopped, with full set: %v, error %v", waits, err)
	}
	p.stop(t, "l", apart, errNo)
	p.wantNone(t)
	p.wantStopped(t, "k", true)
	p.other().wantStopped(t, "k", false)
	p.replay(t, inbox.Filter{IDs: []uuid.UUID{first.ID}}, 1)
	for _, m := range []*inbox.Message{returned(first, 1), second, third} {
		p.wantStopped(t, "k", true)
		p.wantNext(t, "k", m)
	}
	p.wantFree(t, "k")
	p.wantStopped(t, "l", true)
	p.wantNone(t)
}

// Messages and dead letters are stored completely; a returned message counts as never tried.
func testParkingKeepsAll(t *testing.T, p parkingTester) {
	at := time.Now().UTC().Add(-time.Hour).Truncate(time.Second).Add(678 * time.Microsecond) // recent enough for a replay
	m := queued(1)
	m.Key, m.PublishedAt, m.ContentType = "\x7fkey \"ä\"", at, "application/x+json"
	m.Headers = map[string]string{"tenant": "a\u0000b", "ä": ""}
	m.Body = []byte("\x00\xff")
	m.ContentEncoding, m.CorrelationID, m.ReplyTo = "gzip", "call-7", "answers"
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
		h := p.claim(t)
		if h == nil || h.Message == nil {
			t.Fatal("nothing is first")
		}
		got := h.Message
		if len(got.Body) == 0 {
			got.Body = want.Body
		}
		back, sent := utc(inbox.DeadLetter{Message: *got}), utc(inbox.DeadLetter{Message: *want})
		if !reflect.DeepEqual(back, sent) {
			t.Errorf("the message is\n%+v, want\n%+v", back.Message, sent.Message)
		}
		p.take(t, h, nil)
		p.end(t, h)
	}
}

// utc converts the times to one zone, so that they can be compared.
func utc(d inbox.DeadLetter) inbox.DeadLetter {
	d.FirstFailedAt, d.FailedAt = d.FirstFailedAt.UTC(), d.FailedAt.UTC()
	d.Message.FirstFailedAt, d.Message.PublishedAt = d.Message.FirstFailedAt.UTC(), d.Message.PublishedAt.UTC()
	d.Message.History = slices.Clone(d.Message.History)
	for i := range d.Message.History {
		d.Message.History[i].At = d.Message.History[i].At.UTC()
	}
	return d
}

// Senders set their own time stamps: milliseconds read as seconds are the year 55840. A Parking keeps the
// message and leaves out times that it cannot store.
func testParkingOddTimes(t *testing.T, p parkingTester) {
	first, second := queued(1), queued(2)
	first.PublishedAt = time.Unix(1_700_000_000_000, 0)
	second.PublishedAt = time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("", 24*60*60))
	first.FirstFailedAt = first.PublishedAt
	first.History = []inbox.FailedAttempt{{At: first.PublishedAt, Error: "at first", Consumer: "suite"}}
	p.stop(t, "k", first, errNo)
	p.add(t, "k", second)
	p.replay(t, inbox.Filter{}, 1)
	p.wantNext(t, "k", returned(first, 1))
	p.wantNext(t, "k", second)
}

// A message that fails again stops its key in its place.
func testParkingStopsAgain(t *testing.T, p parkingTester) {
	first, second := queued(1), queued(2)
	p.stop(t, "k", first, errNo)
	p.add(t, "k", second)
	for round := 1; round <= 3; round++ {
		p.replay(t, inbox.Filter{}, 1)
		h := p.claim(t)
		if h == nil || h.Message.ID != first.ID || h.Message.Replays != round || h.Message.Attempt != 1 {
			t.Fatalf("round %d: %+v", round, h)
		}
		p.fail(t, h, fmt.Errorf("again"))
		p.wantNone(t)
		p.wantStopped(t, "k", true)
	}
	p.replay(t, inbox.Filter{ErrorContains: "again"}, 1)
	p.wantNext(t, "k", returned(first, 4))
	p.wantNext(t, "k", second)
}

// A message from behind the dead letter can stop the key, too.
func testParkingStopsFollower(t *testing.T, p parkingTester) {
	first, second, third := queued(1), queued(2), queued(3)
	p.stop(t, "k", first, errNo)
	p.add(t, "k", second, third)
	p.replay(t, inbox.Filter{}, 1)
	p.wantNext(t, "k", returned(first, 1))
	p.fail(t, p.claim(t), inbox.Classed(errNo, "payment"))
	p.wantNone(t)
	if n, err := p.letters().Count(t.Context(), inbox.Filter{Class: "payment"}); n != 1 || err != nil {
		t.Fatalf("%d dead letters of class payment, error %v", n, err)
	}
	p.replay(t, inbox.Filter{Class: "payment"}, 1)
	p.wantNext(t, "k", returned(second, 1))
	p.wantNext(t, "k", third)
}

// Copies of kept messages, sent by a slow consumer, change nothing. Neither does a claim that has ended.
func testParkingLateCopies(t *testing.T, p parkingTester) {
	first, second := queued(1), queued(2)
	p.stop(t, "k", first, errNo)
	p.replay(t, inbox.Filter{}, 1)
	p.stop(t, "k", first, errNo)
	p.add(t, "k", first)
	old := p.claim(t)
	noError(t, p.Release(t.Context(), old))
	h := p.claim(t)
	if old == nil || h == nil || h.Message.Replays != 1 {
		t.Fatalf("%+v", h)
	}
	late := func() {
		t.Helper()
		noError(t, errors.Join(p.Retry(t.Context(), old, old.Message, 0), p.Release(t.Context(), old)))
		if next, err := p.Next(t.Context(), old, time.Hour); next != nil || err != nil {
			t.Errorf("an ended claim continues with %+v, error %v", next, err)
		}
		p.fail(t, old, errors.New("too late"))
		if p.take(t, old, nil) {
			t.Error("an ended claim takes a message")
		}
	}
	late()
	p.fail(t, h, fmt.Errorf("again"))
	p.stop(t, "k", first, errors.New("too late"))
	late()
	old = h
	late()
	if got, err := p.letters().Show(t.Context(), first.ID); err != nil || got.Error != "again" {
		t.Errorf("%+v, error %v", got, err)
	}
	p.stop(t, "k", second, errNo) // another dead letter has stopped the key: it waits
	p.replay(t, inbox.Filter{}, 1)
	p.wantNext(t, "k", returned(first, 2))
	late()
	p.wantNext(t, "k", second)
	p.wantFree(t, "k")
}

// A dead letter whose copy was processed meanwhile stops no key; a waiting message with an entry is skipped.
func testParkingProcessedCopies(t *testing.T, p parkingTester) {
	first, second := queued(1), queued(2)
	record := func(m *inbox.Message) {
		noError(t, p.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			_, err := p.entries.Record(ctx, tx, p.consumer, m.ID, "")
			return err
		}))
	}
	record(first)
	p.stop(t, "k", first, errNo)
	p.wantStopped(t, "k", false)
	p.stop(t, "k", queued(3), errNo)
	p.add(t, "k", second)
	record(second)
	p.removeAll(t, 1)
	h := p.claim(t)
	if h == nil || h.Message.ID != second.ID || p.take(t, h, nil) {
		t.Fatalf("claimed %+v", h)
	}
	h, err := p.Next(t.Context(), h, time.Hour)
	if h == nil || h.Message != nil || err != nil {
		t.Fatalf("next is %+v, error %v", h, err)
	}
	noError(t, p.Release(t.Context(), h))
	p.wantStopped(t, "k", false)
}

func (p parkingTester) removeAll(t *testing.T, want int) {
	t.Helper()
	if n, err := p.letters().Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "suite"}); n != want || err != nil {
		t.Fatalf("removed %d, error %v", n, err)
	}
}

func testParkingDrop(t *testing.T, p parkingTester) {
	first, second := queued(1), queued(2)
	p.stop(t, "k", first, errNo)
	p.add(t, "k", second)
	p.removeAll(t, 1)
	p.stop(t, "k", first, errNo) // by the process of the redelivered copy
	p.wantNext(t, "k", second)
	p.wantFree(t, "k")
	if there, err := p.entries.Recorded(t.Context(), p.consumer, []uuid.UUID{first.ID}); !slices.Equal(there, []bool{true}) || err != nil {
		t.Errorf("recorded: %v, error %v", there, err)
	}
	if n, err := p.letters().Count(t.Context(), inbox.Filter{}); n != 0 || err != nil {
		t.Errorf("%d dead letters, error %v", n, err)
	}
	p.stop(t, "alone", queued(3), errNo)
	p.removeAll(t, 1)
	p.wantFree(t, "alone")
}

// Keys with similar spelling are different keys.
func testParkingKeys(t *testing.T, p parkingTester) {
	keys := []string{" ", "A", "a", "a ", "ä", "a\u0308", "𝄞"}
	var all []*inbox.Message
	for i, key := range keys {
		all = append(all, queued(i))
		p.wantStopped(t, key, false)
		p.stop(t, key, all[i], errNo)
		p.wantStopped(t, key, true)
	}
	for i, key := range keys {
		p.replay(t, inbox.Filter{IDs: []uuid.UUID{all[i].ID}}, 1)
		p.wantNext(t, key, returned(all[i], 1))
		p.wantFree(t, key)
	}
}

// DeadLetters are counted and visited by class, oldest first. Only dead letters that stopped a key are
// included.
func testParkingLetters(t *testing.T, p parkingTester) {
	const n = 25
	var want []*inbox.Message
	for i := range n {
		m := queued(i)
		if i%5 == 0 { // so that one read does not return all
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
	if err := p.Scan(t.Context(), "payment", func(dead *inbox.DeadLetter) (driver.Outcome, error) {
		if visited == n {
			t.Fatal("more than were there")
		}
		if dead.Message.ID != want[visited].ID {
			t.Errorf("letter %d is another one", visited)
		}
		visited++
		late := queued(1000 + visited)
		p.stop(t, fmt.Sprint("late", visited), late, inbox.Classed(errNo, "payment"))
		return []driver.Outcome{driver.Keep, driver.Drop, driver.Return}[visited%3], nil
	}, func(_ inbox.DeadLetter, err error) { t.Error(err) }); err != nil || visited != n {
		t.Fatalf("visited %d, error %v", visited, err)
	}
	if found, err := p.letters().Count(t.Context(), inbox.Filter{Class: "payment"}); found != n/3+n || err != nil {
		t.Errorf("%d letters afterwards, error %v", found, err)
	}
	enough := 0
	if err := p.Scan(t.Context(), "payment", func(*inbox.DeadLetter) (driver.Outcome, error) {
		enough++
		return driver.Drop, driver.ErrDone
	}, func(_ inbox.DeadLetter, err error) { t.Error(err) }); err != nil || enough != 1 {
		t.Errorf("visited %d, error %v", enough, err)
	}
	if err := p.Scan(t.Context(), "payment", func(*inbox.DeadLetter) (driver.Outcome, error) { return driver.Drop, errNo },
		func(_ inbox.DeadLetter, err error) { t.Error(err) }); !errors.Is(err, errNo) {
		t.Errorf("error %v", err)
	}
	if found, err := p.letters().Count(t.Context(), inbox.Filter{Class: "payment"}); found != n/3+n || err != nil {
		t.Errorf("%d letters in the end, error %v", found, err)
	}
	removed := 0
	drop := func(*inbox.DeadLetter) (driver.Outcome, error) {
		removed++
		return driver.Drop, nil
	}
	gone := func(_ inbox.DeadLetter, err error) {
		if removed--; !errors.Is(err, driver.ErrGone) {
			t.Error(err)
		}
	}
	noError(t, p.Scan(t.Context(), "payment", func(dead *inbox.DeadLetter) (driver.Outcome, error) {
		noError(t, p.Scan(t.Context(), "payment", drop, gone))
		return drop(dead)
	}, gone))
	if removed != n/3+n {
		t.Errorf("two scans at once removed %d, want %d", removed, n/3+n)
	}
	noError(t, p.Scan(t.Context(), "", func(*inbox.DeadLetter) (driver.Outcome, error) { return driver.Drop, nil }, nil))
}

// A returned dead letter has the edited body; a dead letter that cannot be edited stays.
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
	if h := p.claim(t); h == nil || h.Key != "b" || string(h.Message.Body) != body {
		t.Errorf("claimed %+v", h)
	}
	if left, err := p.letters().List(t.Context(), inbox.Filter{}); err != nil || len(left) != 1 || left[0].Message.ID != stays {
		t.Errorf("left %+v, error %v", left, err)
	}
}

// If several replays run at once, a dead letter is returned once.
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
	for range n {
		if h := p.claim(t); h == nil || h.Message.Replays != 1 {
			t.Errorf("%+v", h)
		}
	}
	p.wantNone(t)
}

// A key is claimed once during a lease. A claim whose lease has ended is valid until the next claim.
func testParkingLeases(t *testing.T, p parkingTester) {
	first, second := queued(1), queued(2)
	p.stop(t, "k", first, errNo)
	p.add(t, "k", second)
	p.removeAll(t, 1)
	short, err := p.Claim(t.Context(), 10*time.Millisecond)
	noError(t, err)
	time.Sleep(50 * time.Millisecond)
	h := p.claim(t)
	if short == nil || h == nil || h.Message.ID != second.ID {
		t.Fatalf("%+v, and then %+v", short, h)
	}
	p.wantNone(t)
	if next, err := p.Next(t.Context(), short, time.Hour); next != nil || err != nil {
		t.Errorf("an ended lease continues with %+v, error %v", next, err)
	}
	noError(t, p.Release(t.Context(), short)) // another claim has the key
	p.wantNone(t)
	if p.take(t, short, nil) || !p.take(t, h, nil) {
		t.Error("the message is not taken by the last claim")
	}
	if h, err = p.Next(t.Context(), h, time.Hour); h == nil || h.Message != nil || err != nil {
		t.Fatalf("next is %+v, error %v", h, err)
	}
	noError(t, p.Release(t.Context(), h))
	p.wantStopped(t, "k", false)
}

// The key that has waited longest is next. A message that waits for its retry keeps its place, and its key
// waits.
func testParkingTurns(t *testing.T, p parkingTester) {
	for i, key := range []string{"k", "l"} {
		p.stop(t, key, queued(i), errNo)
		p.add(t, key, queued(10+i), queued(20+i))
		p.replay(t, inbox.Filter{}, 1)
		time.Sleep(time.Millisecond)
	}
	for _, key := range []string{"k", "l", "k", "l"} {
		h := p.claim(t)
		if h == nil || h.Key != key {
			t.Fatalf("%+v has a turn, want key %s", h, key)
		}
		p.take(t, h, nil)
		time.Sleep(time.Millisecond) // the time must differ, also in a bubble
		p.end(t, h)
	}
	h := p.claim(t)
	later := *h.Message
	later.Attempt, later.History = 2, []inbox.FailedAttempt{{Error: "at first"}}
	noError(t, p.Retry(t.Context(), h, &later, time.Hour))
	other := p.claim(t)
	if other == nil || other.Key != "l" {
		t.Fatalf("%+v has a turn", other)
	}
	noError(t, p.Retry(t.Context(), other, other.Message, 0))
	if h := p.claim(t); h == nil || h.Key != "l" || h.Message.Attempt != other.Message.Attempt {
		t.Fatalf("%+v is tried again", h)
	}
	p.wantNone(t)
}

// Runs with an unknown end count. Runs that have ended do not count, nor do released claims. A message with
// counted runs goes first.
func testParkingRuns(t *testing.T, p parkingTester) {
	p.stop(t, "k", queued(1), errNo)
	p.add(t, "k", queued(2))
	p.replay(t, inbox.Filter{}, 1)
	var h *pgxdriver.Head
	var err error
	for runs := range 4 {
		if h, err = p.Claim(t.Context(), 0); h == nil || h.Runs != runs || err != nil {
			t.Fatalf("run %d: %+v, error %v", runs, h, err)
		}
	}
	other := queued(3)
	p.stop(t, "l", other, errNo)
	p.replay(t, inbox.Filter{}, 1)
	for range 2 {
		noError(t, p.Release(t.Context(), h))
		if h = p.claim(t); h == nil || h.Key != "k" || h.Runs != 3 {
			t.Fatalf("%+v after a released claim", h)
		}
	}
	time.Sleep(time.Millisecond) // the time must differ, also in a bubble
	noError(t, p.Retry(t.Context(), h, h.Message, 0))
	p.wantNext(t, "l", returned(other, 1))
	if h = p.claim(t); h.Runs != 0 {
		t.Errorf("%+v after a run that has ended", h)
	}
	p.take(t, h, errAbort)
	p.take(t, h, nil)
	if h, err := p.Next(t.Context(), h, time.Hour); h == nil || h.Runs != 0 || err != nil {
		t.Errorf("next is %+v, error %v", h, err)
	}
}

// Until its transaction ends no other process gets a message, and arrivals do not wait for it. After that the
// message stays until it is removed.
func testParkingTransactions(t *testing.T, p parkingTester) {
	first, second := queued(1), queued(2)
	p.stop(t, "k", first, errNo)
	p.replay(t, inbox.Filter{}, 1)
	h, err := p.Claim(t.Context(), 0)
	noError(t, err)
	for _, end := range []error{errAbort, nil} {
		err := p.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			if first, err := p.Take(ctx, tx, h); !first || err != nil {
				t.Fatalf("Take: %v, error %v", first, err)
			}
			p.add(t, "k", second)
			if other, err := p.Claim(ctx, time.Hour); other != nil || err != nil {
				t.Errorf("claimed %+v, error %v", other, err)
			}
			if _, messages, err := p.Count(ctx, 10); messages != 2 || err != nil {
				t.Errorf("%d messages, error %v", messages, err)
			}
			return end
		})
		if !errors.Is(err, end) || end == nil && err != nil {
			t.Fatal(err)
		}
	}
	again := p.claim(t)
	if again == nil || again.Message.ID != first.ID || p.take(t, again, nil) {
		t.Fatalf("%+v is first, or is taken twice", again)
	}
	p.end(t, again)
	p.wantNext(t, "k", second)
}

// If many processes claim a message, one gets it.
func testParkingClaimsAtOnce(t *testing.T, p parkingTester) {
	const n = 12
	for i := range n {
		p.stop(t, fmt.Sprint("k", i), queued(i), errNo)
	}
	p.replay(t, inbox.Filter{}, n)
	var taken atomic.Int32
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for {
				h, err := p.Claim(t.Context(), 0)
				if h != nil && h.Message != nil {
					if p.take(t, h, nil) {
						taken.Add(1)
					}
					recorded, failure := p.entries.Recorded(t.Context(), p.consumer, []uuid.UUID{h.Message.ID})
					noError(t, failure)
					if recorded[0] { // otherwise another claim of the key was checked at the same time
						h, err = p.Next(t.Context(), h, time.Hour)
					}
				}
				if err != nil {
					t.Error(err)
				}
				if h != nil {
					noError(t, p.Release(t.Context(), h))
				}
				if keys, _, err := p.Count(t.Context(), n); keys == 0 || err != nil {
					noError(t, err)
					return
				}
			}
		})
	}
	all.Wait()
	if taken.Load() != n {
		t.Errorf("%d of %d messages taken", taken.Load(), n)
	}
}

// A message that arrives while its key becomes free is stored behind it, or finds it free: it is never left
// alone.
func testParkingArrivalsAtOnce(t *testing.T, p parkingTester) {
	const rounds = 20
	for i := range rounds {
		p.stop(t, "k", queued(i), errNo)
		p.removeAll(t, 1)
		late := queued(100 + i)
		var waits bool
		var all sync.WaitGroup
		all.Go(func() { noError(t, p.Release(t.Context(), p.claim(t))) })
		all.Go(func() {
			var err error
			waits, err = p.Wait(t.Context(), "k", late, false)
			noError(t, err)
		})
		all.Wait()
		p.wantStopped(t, "k", waits)
		if waits {
			p.wantNext(t, "k", late)
			p.wantFree(t, "k")
		}
	}
}

// If many dead letters stop a key at once, one of them stops it and the other messages wait.
func testParkingStopsAtOnce(t *testing.T, p parkingTester) {
	const n = 8
	msgs := []*inbox.Message{queued(0), queued(1), queued(2), queued(3)}
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { noError(t, p.Stop(t.Context(), "k", driverLetter(msgs[i%4], errNo))) })
	}
	all.Wait()
	if found, err := p.letters().Count(t.Context(), inbox.Filter{}); found != 1 || err != nil {
		t.Errorf("%d letters, error %v", found, err)
	}
	if keys, messages, err := p.Count(t.Context(), 10); keys != 1 || messages != 4 || err != nil {
		t.Errorf("%d keys, %d messages, error %v", keys, messages, err)
	}
}

func testParkingCount(t *testing.T, p parkingTester) {
	want := func(most, keys, messages int) {
		t.Helper()
		if k, m, err := p.Count(t.Context(), most); k != keys || m != messages || err != nil {
			t.Errorf("%d keys, %d messages, error %v, want %d, %d", k, m, err, keys, messages)
		}
	}
	want(10, 0, 0)
	p.stop(t, "k", queued(1), errNo)
	p.add(t, "k", queued(2), queued(3))
	p.stop(t, "l", queued(4), errNo)
	want(10, 2, 4)
	want(3, 2, 3)
}
