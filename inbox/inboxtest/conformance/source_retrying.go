package conformance

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// retrying returns the waiting messages of a source's consumer. It skips the test if the transport cannot list them.
func retrying(t *testing.T, f SourceFixture, source driver.Source) driver.DeadLetters {
	t.Helper()
	delayer, ok := source.(driver.Delayer)
	if ok == f.NoRetrying {
		t.Fatalf("the source has Retrying: %t", ok)
	}
	if !ok {
		t.Skip("the transport cannot list waiting messages")
	}
	return delayer.Retrying()
}

// delay moves messages to later, as if they had failed once.
func delay(t *testing.T, source driver.Source, s driver.Session, by time.Duration, ds ...driver.Delivery) {
	t.Helper()
	failed := time.Now().Truncate(time.Millisecond)
	next := driver.Progress{Attempt: 2, FirstFailedAt: failed, History: []inbox.FailedAttempt{{At: failed, Error: "broken at last", Consumer: "suite"}}}
	moves := make([]driver.Move, len(ds))
	for i, d := range ds {
		moves[i] = later(d, by, next)
	}
	moved(t, source, s, moves...)
}

// waitingIn returns the waiting messages of a class and keeps them.
func waitingIn(t *testing.T, r driver.DeadLetters, class string) (all []inbox.DeadLetter) {
	t.Helper()
	await(t, func() error {
		all = nil
		return r.Scan(t.Context(), class, func(d *inbox.DeadLetter) (driver.Outcome, error) {
			all = append(all, *d)
			return driver.Keep, nil
		}, never(t))
	})
	return all
}

func wantWaiting(t *testing.T, r driver.DeadLetters, class string, want int) []inbox.DeadLetter {
	t.Helper()
	await(t, func() error { // brokers count with a delay
		depths, err := r.Depths(t.Context())
		if err != nil {
			return err
		}
		if len(depths) != 2 || depths[0].Class != driver.WaitingPutOff || depths[1].Class != driver.WaitingRetry {
			return fmt.Errorf("not the classes of waiting messages: %+v", depths)
		}
		for _, d := range depths {
			if d.Class == class && d.Messages != want {
				return fmt.Errorf("%d messages of class %s, want %d", d.Messages, class, want)
			}
		}
		return nil
	})
	found := waitingIn(t, r, class)
	if len(found) != want {
		t.Fatalf("%d messages of class %s, want %d", len(found), class, want)
	}
	return found
}

// A scan visits the messages that wait, with the last failure and the due time, and leaves them as they are.
func testRetrying(t *testing.T, f SourceFixture) {
	source := running(t, f)
	r := retrying(t, f, source)
	want := full()
	f.Publish(t, want, named("put.off"))
	s := begin(t, source, 10)
	ds := take(t, s, 2)
	const by = time.Hour
	began := time.Now()
	delay(t, source, s, by, ds[0])
	moved(t, source, s, driver.Move{Delivery: ds[1], Target: driver.ToLater, Delay: by, PutOff: true, Next: driver.Progress{Attempt: 1}})
	for range 2 { // the second scan finds them unchanged
		found := wantWaiting(t, r, driver.WaitingRetry, 1)[0]
		wantEnvelope(t, &found.Message, want)
		if found.Class != driver.WaitingRetry || found.Error != "broken at last" || found.Consumer != "suite" || found.Attempts != 1 || found.Message.Attempt != 2 ||
			found.FailedAt.IsZero() || !found.FirstFailedAt.Equal(found.FailedAt) || len(found.Message.History) != 0 || found.Message.Queue != ds[0].Message().Queue {
			t.Errorf("found %+v", found)
		}
		wantDue(t, found, began, by)
	}
	found := wantWaiting(t, r, driver.WaitingPutOff, 1)[0]
	if found.Message.Name != "put.off" || found.Attempts != 0 || found.Error != "" || !found.FailedAt.IsZero() {
		t.Errorf("put off: %+v", found)
	}
	wantDue(t, found, began, by)
	wantNothing(t, s)
	ended(t, s)
}

// wantDue checks that a message is due after a delay, as a Move may delay it.
func wantDue(t *testing.T, d inbox.DeadLetter, since time.Time, by time.Duration) {
	t.Helper()
	const slack = 2 * time.Second // of clocks, and of the time between two steps
	if d.DueAt.Before(since.Add(by-slack)) || d.DueAt.After(time.Now().Add(by+by/2+slack)) {
		t.Errorf("due at %v, want %v after %v", d.DueAt, by, since)
	}
}

// A message that is made due arrives as its next attempt. One that is postponed waits longer, and one that is dropped
// never arrives.
func testRetryingChanges(t *testing.T, f SourceFixture) {
	all := numbered(t, f, 4)
	source := running(t, f)
	r := retrying(t, f, source)
	s := begin(t, source, 10)
	delay(t, source, s, time.Hour, take(t, s, len(all))...)
	wantWaiting(t, r, driver.WaitingRetry, len(all))
	at := func(d *inbox.DeadLetter) int {
		return slices.IndexFunc(all, func(m *inbox.Message) bool { return m.ID == d.Message.ID })
	}
	visited := map[int]int{}
	began := time.Now()
	noError(t, r.Scan(t.Context(), driver.WaitingRetry, func(d *inbox.DeadLetter) (driver.Outcome, error) {
		visited[at(d)]++
		switch at(d) {
		case 0:
			d.DueAt = time.Now()
			return driver.Return, nil
		case 1:
			d.DueAt = time.Now().Add(20 * time.Hour)
			return driver.Return, nil
		case 2:
			return driver.Drop, nil
		}
		return driver.Keep, nil
	}, never(t)))
	for i := range all {
		if visited[i] != 1 {
			t.Errorf("%s was visited %d times", all[i].Name, visited[i])
		}
	}
	d := take(t, s, 1)[0]
	if m := d.Message(); m.ID != all[0].ID || m.Attempt != 2 || m.Replays != 0 || m.Redelivered || len(m.History) != 1 || m.FirstFailedAt.IsZero() {
		t.Errorf("made due: %+v", m)
	}
	acked(t, s, d)
	for _, d := range wantWaiting(t, r, driver.WaitingRetry, 2) {
		if at(&d) == 1 {
			wantDue(t, d, began, 20*time.Hour)
		} else if at(&d) != 3 || d.DueAt.After(began.Add(2*time.Hour)) {
			t.Errorf("%s is due at %v", d.Message.Name, d.DueAt)
		}
	}
	noError(t, r.Scan(t.Context(), driver.WaitingRetry, func(d *inbox.DeadLetter) (driver.Outcome, error) {
		d.DueAt = time.Now()
		return driver.Return, nil
	}, never(t)))
	for range 2 {
		take1(t, s, func(d driver.Delivery) { acked(t, s, d) })
	}
	wantWaiting(t, r, driver.WaitingRetry, 0)
	wantNothing(t, s)
	ended(t, s)
}

// An error of visit ends a scan; earlier outcomes were applied.
func testRetryingEnds(t *testing.T, f SourceFixture) {
	all := numbered(t, f, 6)
	source := running(t, f)
	r := retrying(t, f, source)
	s := begin(t, source, 10)
	delay(t, source, s, time.Hour, take(t, s, len(all))...)
	left := len(all)
	for _, end := range []error{errBoom, driver.ErrDone} {
		dropTwo(t, r, driver.WaitingRetry, end)
		left -= 2
		wantWaiting(t, r, driver.WaitingRetry, left)
	}
	ended(t, s)
}

// A message that becomes due while an operator looks at it arrives once.
func testRetryingDue(t *testing.T, f SourceFixture) {
	numbered(t, f, 1)
	source := running(t, f)
	r := retrying(t, f, source)
	s := begin(t, source, 10)
	delay(t, source, s, time.Second, take(t, s, 1)...)
	for range 20 { // it may be due before the first scan sees it
		err := r.Scan(t.Context(), driver.WaitingRetry, func(d *inbox.DeadLetter) (driver.Outcome, error) {
			time.Sleep(1500 * time.Millisecond)
			d.DueAt = time.Now()
			return driver.Return, nil
		}, func(d inbox.DeadLetter, err error) {
			if !errors.Is(err, driver.ErrGone) {
				t.Errorf("%s: %v", d.Message.Name, err)
			}
		})
		if err != nil && !errors.Is(err, inbox.ErrHeld) {
			t.Error(err)
		}
		if found := waitingIn(t, r, driver.WaitingRetry); len(found) == 0 {
			break
		}
	}
	if m := take1(t, s, func(d driver.Delivery) { acked(t, s, d) }); m.Attempt != 2 {
		t.Errorf("arrived %+v", m)
	}
	wantNothing(t, s)
	ended(t, s)
}

// Operators change messages while they become due. Each message arrives once, or is dropped.
func testRetryingRace(t *testing.T, f SourceFixture) {
	const n = 40
	numbered(t, f, n)
	source := running(t, f)
	r := retrying(t, f, source)
	s := begin(t, source, n)
	for _, d := range take(t, s, n) {
		delay(t, source, s, time.Duration(50+rand.IntN(400))*time.Millisecond, d)
	}
	var mu sync.Mutex
	arrived, drops := map[uuid.UUID]int{}, map[uuid.UUID]int{}
	gone := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(drops)
	}
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	var operators sync.WaitGroup
	for range 2 {
		operators.Go(func() {
			for range 20 { // without end, some messages would never be due
				changeWaiting(ctx, t, r, func(id uuid.UUID, dropped bool) {
					mu.Lock()
					defer mu.Unlock()
					if dropped {
						drops[id]++
					} else if drops[id]--; drops[id] == 0 {
						delete(drops, id)
					}
				})
			}
		})
	}
	for idle := 0; idle < 3 && ctx.Err() == nil; idle++ { // a message whose drop fails still arrives
		receiving, end := context.WithTimeout(ctx, 200*time.Millisecond)
		ds, err := s.Receive(receiving, n)
		end()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		for _, d := range ds {
			arrived[d.Message().ID]++
			acked(t, s, d)
		}
		if len(ds) > 0 || len(arrived)+gone() < n {
			idle = -1
		}
	}
	operators.Wait()
	for id, times := range arrived {
		if times > 1 || drops[id] > 0 {
			t.Errorf("%s arrived %d times, and was dropped %d times", id, times, drops[id])
		}
	}
	for id, times := range drops {
		if times > 1 {
			t.Errorf("%s was dropped %d times", id, times)
		}
	}
	if len(arrived)+len(drops) != n {
		t.Errorf("%d arrived and %d dropped, want %d together", len(arrived), len(drops), n)
	}
	wantNothing(t, s)
	ended(t, s)
}

// changeWaiting changes waiting messages at random. It calls drop for each one that it is about to drop, and again if
// that failed.
func changeWaiting(ctx context.Context, t *testing.T, r driver.DeadLetters, drop func(id uuid.UUID, dropped bool)) {
	dropping := map[uuid.UUID]bool{}
	err := r.Scan(ctx, driver.WaitingRetry, func(d *inbox.DeadLetter) (driver.Outcome, error) {
		switch rand.IntN(6) {
		case 0:
			dropping[d.Message.ID] = true
			drop(d.Message.ID, true)
			return driver.Drop, nil
		case 1:
			return driver.Keep, nil
		case 2:
			return driver.Keep, driver.ErrDone
		default:
			d.DueAt = time.Now().Add(time.Duration(rand.IntN(200)) * time.Millisecond)
			return driver.Return, nil
		}
	}, func(d inbox.DeadLetter, err error) {
		if dropping[d.Message.ID] { // not if another change of it failed
			drop(d.Message.ID, false)
		}
		if !errors.Is(err, driver.ErrGone) && ctx.Err() == nil {
			t.Errorf("%s: %v", d.Message.Name, err)
		}
	})
	if err != nil && !errors.Is(err, inbox.ErrHeld) && ctx.Err() == nil {
		t.Error(err)
	}
	time.Sleep(10 * time.Millisecond)
}

// Another consumer of the same messages has its own waiting messages.
func testRetryingOfOneConsumer(t *testing.T, f SourceFixture) {
	if f.Another == nil {
		t.Skip("a queue has only one consumer")
	}
	numbered(t, f, 2)
	source, other := running(t, f), run(t, f.Another(t))
	r := retrying(t, f, source)
	s := begin(t, source, 10)
	delay(t, source, s, time.Hour, take(t, s, 2)...)
	wantWaiting(t, r, driver.WaitingRetry, 2)
	wantWaiting(t, retrying(t, f, other), driver.WaitingRetry, 0)
	ended(t, s)
}
