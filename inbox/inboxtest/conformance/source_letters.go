package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// A scan visits all, the oldest first, and does what it is told.
func testScan(t *testing.T, f SourceFixture) {
	const n = 10
	all := letters(t, f, OwnClass, n)
	l := f.Letters(t)
	for range 2 { // the second one finds them where they were
		var seen []uuid.UUID
		for _, d := range scan(t, f, OwnClass) {
			seen = append(seen, d.Message.ID)
		}
		if !slices.Equal(seen, all) {
			t.Fatalf("%d letters, not the %d in their order", len(seen), n)
		}
	}
	wantDepth(t, l, OwnClass, n)
	wantDepth(t, l, driver.ClassDefault, 0)
	visited := 0
	if err := l.Scan(t.Context(), OwnClass, func(*inbox.DeadLetter) (driver.Fate, error) {
		visited++
		return []driver.Fate{driver.Keep, driver.Drop}[visited%2], nil
	}, never(t)); err != nil {
		t.Fatal(err)
	}
	wantDepth(t, l, OwnClass, n/2)
	for i, d := range scan(t, f, OwnClass) {
		if want := all[2*i+1]; d.Message.ID != want {
			t.Errorf("letter %d is another one", i)
		}
	}
}

func wantDepth(t *testing.T, l driver.Letters, class string, want int) {
	t.Helper()
	await(t, func() error { // brokers count late
		depths, err := l.Depths(t.Context())
		if err != nil {
			return err
		}
		if !slices.IsSortedFunc(depths, func(a, b driver.Depth) int { return compare(a.Class, b.Class) }) || len(depths) != 5 {
			return fmt.Errorf("not the 5 classes in their order: %+v", depths)
		}
		for _, d := range depths {
			if d.Class == class && d.Messages != want {
				return fmt.Errorf("%d messages of class %s, want %d", d.Messages, class, want)
			}
			if d.Messages == 0 && !d.Oldest.IsZero() || d.Oldest.After(time.Now().Add(time.Second)) {
				return fmt.Errorf("the oldest of %d is of %v", d.Messages, d.Oldest)
			}
		}
		return nil
	})
}

func compare(a, b string) int {
	if a < b {
		return -1
	}
	return 1
}

// What a scan returns is in the queue again as if it had never been tried, with the body that it was given.
func testScanReturns(t *testing.T, f SourceFixture) {
	want := full()
	f.Publish(t, want)
	source := running(t, f)
	s := begin(t, source, 10)
	l := f.Letters(t)
	bodies := [][]byte{want.Body, []byte(`{"edited":true}`), {}}
	for round, body := range bodies {
		round++
		d := take(t, s, 1)[0]
		letter := driver.NewDeadLetter(d.Message(), driver.Failure{Class: "unheard-of", Err: errors.New("broken")}, "suite", time.Now())
		letter.Attempts = 6
		letter.Message.History = []inbox.FailedAttempt{{At: time.Now(), Error: "broken", Consumer: "suite"}}
		moved(t, source, s, driver.Move{Delivery: d, Target: driver.ToDead, Letter: letter})
		wantDepth(t, l, driver.ClassDefault, 1)
		if err := l.Scan(t.Context(), driver.ClassDefault, func(dead *inbox.DeadLetter) (driver.Fate, error) {
			dead.Message.Body = body
			return driver.Return, nil
		}, never(t)); err != nil {
			t.Fatal(err)
		}
		want.Body = body
		wantDepth(t, l, driver.ClassDefault, 0)
		d = take(t, s, 1)[0]
		m := d.Message()
		wantEnvelope(t, m, want)
		if m.Attempt != 1 || m.Recovered != 0 || m.Replays != round || !m.FirstFailedAt.IsZero() || len(m.History) != 0 || m.Redelivered {
			t.Errorf("returned the %d. time: %+v", round, m)
		}
		moved(t, source, s, later(d, 0, driver.Progress{Attempt: 2}))
		d = take(t, s, 1)[0]
		if m := d.Message(); m.Attempt != 2 || m.Replays != round {
			t.Errorf("retried after its return: %+v", m)
		}
		noError(t, s.GiveBack(t.Context(), []driver.Delivery{d}))
	}
	acked(t, s, take(t, s, 1)...)
	wantNothing(t, s)
	ended(t, s)
}

// visit's errors end a scan; what was decided before has been done.
func testScanEnds(t *testing.T, f SourceFixture) {
	const n = 10
	letters(t, f, driver.ClassDefault, n)
	l := f.Letters(t)
	boom := errors.New("boom")
	left := n
	for _, end := range []error{boom, driver.ErrDone} {
		visited := 0
		err := l.Scan(t.Context(), driver.ClassDefault, func(*inbox.DeadLetter) (driver.Fate, error) {
			if visited++; visited == 3 {
				return driver.Drop, end
			}
			return driver.Drop, nil
		}, never(t))
		if errors.Is(end, boom) && !errors.Is(err, boom) || errors.Is(end, driver.ErrDone) && err != nil {
			t.Errorf("ended by %v: %v", end, err)
		}
		left -= 2
		wantDepth(t, l, driver.ClassDefault, left)
		if found := len(scan(t, f, driver.ClassDefault)); found != left {
			t.Errorf("%d letters, want %d", found, left)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	drop := func(*inbox.DeadLetter) (driver.Fate, error) { return driver.Drop, nil }
	if err := l.Scan(ctx, driver.ClassDefault, drop, never(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
	if err := l.Scan(t.Context(), driver.ClassQuarantined, drop, never(t)); err != nil {
		t.Errorf("of a place that is empty: %v", err)
	}
	wantDepth(t, l, driver.ClassDefault, left)
}

// Scans at once return each letter once.
func testScansAtOnce(t *testing.T, f SourceFixture) {
	const n = 60
	letters(t, f, driver.ClassDefault, n)
	var scans sync.WaitGroup
	slow := func(*inbox.DeadLetter) (driver.Fate, error) {
		time.Sleep(time.Millisecond)
		return driver.Return, nil
	}
	for range 3 {
		l := f.Letters(t)
		scans.Go(func() {
			if err := l.Scan(t.Context(), driver.ClassDefault, slow, never(t)); err != nil && !errors.Is(err, inbox.ErrHeld) {
				t.Error(err)
			}
		})
	}
	scans.Wait()
	// What one of them held while another one looked is for a later scan.
	l := f.Letters(t)
	await(t, func() error {
		if err := l.Scan(t.Context(), driver.ClassDefault, func(*inbox.DeadLetter) (driver.Fate, error) { return driver.Return, nil }, never(t)); err != nil {
			return err
		}
		depths, err := l.Depths(t.Context())
		for _, d := range depths {
			if d.Messages > 0 {
				return fmt.Errorf("%d letters of class %s are left", d.Messages, d.Class)
			}
		}
		return err
	})
	s := begin(t, running(t, f), n+10)
	for seen := map[uuid.UUID]bool{}; len(seen) < n; {
		m := take1(t, s, func(d driver.Delivery) { acked(t, s, d) })
		switch {
		case m.Replays == 0 && !f.Forgetful:
			t.Errorf("%s comes again, which was moved", m.Name)
		case m.Replays > 0 && seen[m.ID]:
			t.Errorf("%s was returned twice", m.Name)
		case m.Replays > 0:
			seen[m.ID] = true
		}
	}
	if !f.Forgetful {
		wantNothing(t, s)
	}
	ended(t, s)
}

// A scan that loses its connection has returned some, twice at worst, and lost none.
func testScanFaults(t *testing.T, f SourceFixture) {
	if f.Network == nil {
		t.Skip("there is no network to break")
	}
	const n = 80
	all := letters(t, f, driver.ClassDefault, n)
	l := f.Letters(t)
	visited := 0
	visit := func(*inbox.DeadLetter) (driver.Fate, error) {
		if visited++; visited%25 == 0 {
			f.Network.CutConnections()
		}
		return driver.Return, nil
	}
	await(t, func() error {
		err := l.Scan(t.Context(), driver.ClassDefault, visit, func(inbox.DeadLetter, error) {})
		depths, depthErr := l.Depths(t.Context())
		for _, d := range depths {
			if d.Messages > 0 {
				err = errors.Join(err, fmt.Errorf("%d letters of class %s are left", d.Messages, d.Class))
			}
		}
		return errors.Join(err, depthErr)
	})
	if visited < n {
		t.Errorf("%d letters visited", visited)
	}
	s := begin(t, running(t, f), n)
	seen := map[uuid.UUID]bool{}
	for len(seen) < n {
		for _, d := range take(t, s, 1) {
			seen[d.Message().ID] = true
			acked(t, s, d)
		}
	}
	for _, id := range all {
		if !seen[id] {
			t.Errorf("%s is lost", id)
		}
	}
}
