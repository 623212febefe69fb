package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// A scan visits all dead letters, oldest first, and applies the outcomes.
func testScan(t *testing.T, f SourceFixture) {
	const n = 10
	all := letters(t, f, OwnClass, n)
	l := f.DeadLetters(t)
	for range 2 { // the second scan finds them unchanged
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
	if err := l.Scan(t.Context(), OwnClass, func(*inbox.DeadLetter) (driver.Outcome, error) {
		visited++
		return []driver.Outcome{driver.Keep, driver.Drop}[visited%2], nil
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

func wantDepth(t *testing.T, l driver.DeadLetters, class string, want int) {
	t.Helper()
	await(t, func() error { // brokers count with a delay
		depths, err := l.Depths(t.Context())
		if err != nil {
			return err
		}
		var classes []string
		for _, d := range depths {
			classes = append(classes, d.Class)
		}
		own := []string{OwnClass}
		if !slices.Equal(classes, driver.Places(driver.Traits{}, own)) && !slices.Equal(classes, driver.Places(driver.Traits{FewPlaces: true}, own)) {
			return fmt.Errorf("not the classes with a place, in their order: %+v", depths)
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

// place returns the class whose queue gets the dead letters of a class.
func place(t *testing.T, f SourceFixture, class string) string {
	t.Helper()
	depths, err := f.DeadLetters(t).Depths(t.Context())
	noError(t, err)
	if slices.ContainsFunc(depths, func(d driver.Depth) bool { return d.Class == class }) {
		return class
	}
	return driver.ClassDefault
}

// A returned message is in the queue as if never tried, with the new body.
func testScanReturns(t *testing.T, f SourceFixture) {
	want := full()
	f.Publish(t, want)
	source := running(t, f)
	s := begin(t, source, 10)
	l := f.DeadLetters(t)
	bodies := [][]byte{want.Body, []byte(`{"edited":true}`), {}}
	for round, body := range bodies {
		round++
		d := take(t, s, 1)[0]
		letter := driver.NewDeadLetter(d.Message(), driver.Failure{Class: "unheard-of", Err: errors.New("broken")}, "suite", time.Now())
		letter.Attempts = 6
		letter.Message.History = []inbox.FailedAttempt{{At: time.Now(), Error: "broken", Consumer: "suite"}}
		moved(t, source, s, driver.Move{Delivery: d, Target: driver.ToDead, DeadLetter: letter})
		wantDepth(t, l, driver.ClassDefault, 1)
		if err := l.Scan(t.Context(), driver.ClassDefault, func(dead *inbox.DeadLetter) (driver.Outcome, error) {
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

// dropTwo drops two dead letters of a class. The third one ends the scan with an error.
func dropTwo(t *testing.T, l driver.DeadLetters, class string, end error) {
	t.Helper()
	visited := 0
	err := l.Scan(t.Context(), class, func(*inbox.DeadLetter) (driver.Outcome, error) {
		if visited++; visited == 3 {
			return driver.Drop, end
		}
		return driver.Drop, nil
	}, never(t))
	if errors.Is(end, errBoom) && !errors.Is(err, errBoom) || errors.Is(end, driver.ErrDone) && err != nil {
		t.Errorf("ended by %v: %v", end, err)
	}
}

// An error of visit ends a scan; earlier outcomes were applied.
func testScanEnds(t *testing.T, f SourceFixture) {
	const n = 10
	letters(t, f, driver.ClassDefault, n)
	l := f.DeadLetters(t)
	left := n
	for _, end := range []error{errBoom, driver.ErrDone} {
		dropTwo(t, l, driver.ClassDefault, end)
		left -= 2
		wantDepth(t, l, driver.ClassDefault, left)
		if found := len(scan(t, f, driver.ClassDefault)); found != left {
			t.Errorf("%d letters, want %d", found, left)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	drop := func(*inbox.DeadLetter) (driver.Outcome, error) { return driver.Drop, nil }
	if err := l.Scan(ctx, driver.ClassDefault, drop, never(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
	if err := l.Scan(t.Context(), driver.ClassQuarantined, drop, never(t)); err != nil {
		t.Errorf("of a place that is empty: %v", err)
	}
	wantDepth(t, l, driver.ClassDefault, left)
}

// Several scans at once return each dead letter once, and one of them counts it.
func testScansAtOnce(t *testing.T, f SourceFixture) {
	const n = 60
	letters(t, f, driver.ClassDefault, n)
	var scans sync.WaitGroup
	var returned atomic.Int32
	slow := func(*inbox.DeadLetter) (driver.Outcome, error) {
		time.Sleep(time.Millisecond)
		returned.Add(1)
		return driver.Return, nil
	}
	failed := func(_ inbox.DeadLetter, err error) {
		if returned.Add(-1); !errors.Is(err, driver.ErrGone) {
			t.Errorf("error %v, want ErrGone", err)
		}
	}
	for range 3 {
		l := f.DeadLetters(t)
		scans.Go(func() {
			if err := l.Scan(t.Context(), driver.ClassDefault, slow, failed); err != nil && !errors.Is(err, inbox.ErrHeld) {
				t.Error(err)
			}
		})
	}
	scans.Wait()
	// A dead letter held by one scan while another one ran is left for a later scan.
	l := f.DeadLetters(t)
	await(t, func() error {
		if err := l.Scan(t.Context(), driver.ClassDefault, slow, failed); err != nil {
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
	if got := returned.Load(); got != n {
		t.Errorf("%d returned, want %d", got, n)
	}
	s := begin(t, running(t, f), n+10)
	for seen := map[uuid.UUID]bool{}; len(seen) < n; {
		m := take1(t, s, func(d driver.Delivery) { acked(t, s, d) })
		switch {
		case m.Replays == 0 && !f.Forgetful:
			t.Errorf("%s was moved and is redelivered", m.Name)
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

// Two scans have read the same dead letter before they return or delete it: one of them counts it. An older dead letter
// of another class stays.
func testScanInScan(t *testing.T, f SourceFixture) {
	letters(t, f, OwnClass, 1)
	outcomes := []driver.Outcome{driver.Drop, driver.Return}
	all := letters(t, f, driver.ClassDefault, len(outcomes)*len(outcomes))
	counts := map[uuid.UUID]int{}
	apply := func(dead *inbox.DeadLetter, outcome driver.Outcome) (driver.Outcome, error) {
		counts[dead.Message.ID]++
		return outcome, nil
	}
	failed := func(dead inbox.DeadLetter, err error) {
		if counts[dead.Message.ID]--; !errors.Is(err, driver.ErrGone) {
			t.Errorf("error %v, want ErrGone", err)
		}
	}
	if err := f.DeadLetters(t).Scan(t.Context(), driver.ClassDefault, func(dead *inbox.DeadLetter) (driver.Outcome, error) {
		i := slices.Index(all, dead.Message.ID)
		if err := f.DeadLetters(t).Scan(t.Context(), driver.ClassDefault, func(same *inbox.DeadLetter) (driver.Outcome, error) {
			if same.Message.ID != dead.Message.ID {
				return driver.Keep, nil
			}
			return apply(same, outcomes[i/len(outcomes)])
		}, failed); err != nil && !errors.Is(err, inbox.ErrHeld) {
			t.Error(err)
		}
		return apply(dead, outcomes[i%len(outcomes)])
	}, failed); err != nil {
		t.Error(err)
	}
	for i, id := range all {
		if counts[id] != 1 {
			t.Errorf("outcome %d within a scan of outcome %d: counted %d times", outcomes[i/len(outcomes)], outcomes[i%len(outcomes)], counts[id])
		}
	}
	wantDepth(t, f.DeadLetters(t), driver.ClassDefault, 0)
	wantDepth(t, f.DeadLetters(t), OwnClass, 1)
}

// A scan that loses its connection returns some dead letters, twice at worst, and loses none.
func testScanFaults(t *testing.T, f SourceFixture) {
	if f.Network == nil {
		t.Skip("there is no network to break")
	}
	const n = 80
	all := letters(t, f, driver.ClassDefault, n)
	l := f.DeadLetters(t)
	visited := 0
	visit := func(*inbox.DeadLetter) (driver.Outcome, error) {
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

func later(d driver.Delivery, delay time.Duration, next driver.Progress) driver.Move {
	return driver.Move{Delivery: d, Target: driver.ToLater, Delay: delay, Next: next}
}

// A delayed message does not arrive before its delay.
func testMoveLater(t *testing.T, f SourceFixture) {
	delays := []time.Duration{0, 100 * time.Millisecond, 450 * time.Millisecond, 1200 * time.Millisecond, 24 * time.Hour}
	all := numbered(t, f, len(delays))
	source := running(t, f)
	s := begin(t, source, 10)
	moves := make([]driver.Move, len(delays))
	for i, d := range take(t, s, len(delays)) {
		moves[i] = later(d, delays[i], driver.Progress{Attempt: 2})
	}
	began := time.Now()
	moved(t, source, s, moves...)
	for range len(delays) - 1 { // the last one is due tomorrow
		d := take(t, s, 1)[0]
		i := slices.IndexFunc(all, func(m *inbox.Message) bool { return m.ID == d.Message().ID })
		if took := time.Since(began); took < delays[i] {
			t.Errorf("the one of %v came after %v", delays[i], took)
		}
		if m := d.Message(); m.Attempt != 2 || m.Redelivered {
			t.Errorf("the one of %v: %+v", delays[i], m)
		}
		acked(t, s, d)
	}
	wantNothing(t, s)
	ended(t, s)
}

// A retry is the unchanged message, with the record of its attempts.
func testMoveKeepsAll(t *testing.T, f SourceFixture) {
	large, crowded := full(), full()
	large.Body = []byte(`"` + strings.Repeat("x", driver.MaxBodyBytes-2) + `"`)
	for i := range 8 { // each short enough to be readable
		crowded.Headers[fmt.Sprintf("holdfast-junk-%d", i)] = strings.Repeat("j", 7<<10)
	}
	first := time.Now().Add(-time.Hour).Truncate(time.Millisecond)
	next := driver.Progress{Attempt: 4, Recovered: 2, FirstFailedAt: first, History: []inbox.FailedAttempt{
		{At: first, Error: "ü: \"broken\"\nat once", Consumer: "billing"},
		{At: first.Add(time.Minute), Error: "broken", Consumer: "suite"},
	}}
	source := running(t, f)
	s := begin(t, source, 10)
	for name, want := range map[string]*inbox.Message{"usual": full(), "large body": large, "large headers": crowded} {
		f.Publish(t, want)
		wantEnvelope(t, take1(t, s, func(d driver.Delivery) { moved(t, source, s, later(d, 100*time.Millisecond, next)) }), want)
		got := take1(t, s, func(d driver.Delivery) { acked(t, s, d) })
		wantEnvelope(t, got, want)
		if got.Attempt != 4 || got.Recovered != 2 || !got.FirstFailedAt.Equal(first) || got.Replays != 0 {
			t.Errorf("%s: attempt %d, recovered %d, first failure %v, replays %d", name, got.Attempt, got.Recovered, got.FirstFailedAt, got.Replays)
		}
		wantHistory(t, got.History, next.History)
	}
	ended(t, s)
}

// take1 receives one message and settles it.
func take1(t *testing.T, s driver.Session, settle func(driver.Delivery)) *inbox.Message {
	t.Helper()
	d := take(t, s, 1)[0]
	settle(d)
	return d.Message()
}

func wantHistory(t *testing.T, got, want []inbox.FailedAttempt) {
	t.Helper()
	if !slices.EqualFunc(got, want, func(a, b inbox.FailedAttempt) bool {
		return a.At.Equal(b.At) && a.Error == b.Error && a.Consumer == b.Consumer
	}) {
		t.Errorf("history %+v, want %+v", got, want)
	}
}

func testMoveTail(t *testing.T, f SourceFixture) {
	all := numbered(t, f, 3)
	source := running(t, f)
	s := begin(t, source, 1)
	d := take(t, s, 1)[0]
	moved(t, source, s, driver.Move{Delivery: d, Target: driver.ToTail, Next: driver.Progress{Attempt: 1}})
	for _, want := range []*inbox.Message{all[1], all[2], all[0]} {
		m := take1(t, s, func(d driver.Delivery) { acked(t, s, d) })
		if m.ID != want.ID || m.Attempt != 1 {
			t.Errorf("%s at attempt %d, want %s", m.Name, m.Attempt, want.Name)
		}
	}
	wantNothing(t, s)
	ended(t, s)
}

// Each class has a queue, or uses the queue of default. The dead letter has the complete record.
func testMoveDead(t *testing.T, f SourceFixture) {
	source := running(t, f)
	s := begin(t, source, 10)
	at := time.Now().Add(-time.Minute).Truncate(time.Millisecond)
	for class, place := range map[string]string{
		driver.ClassValidation: place(t, f, driver.ClassValidation), OwnClass: OwnClass, "unheard-of": driver.ClassDefault,
	} {
		want := full()
		f.Publish(t, want)
		d := take(t, s, 1)[0]
		letter := inbox.DeadLetter{
			Message: *d.Message(), Class: class, Error: "ü: \"broken\"\nat last", Attempts: 7, FirstFailedAt: at, FailedAt: at.Add(30 * time.Second), Consumer: "suite",
			ErrorType: "*pgconn.PgError", SQLState: "40P01", Fingerprint: "0123456789abcdef",
		}
		letter.Message.History = []inbox.FailedAttempt{{At: at, Error: "at first", Consumer: "billing"}}
		moved(t, source, s, driver.Move{Delivery: d, Target: driver.ToDead, DeadLetter: letter})
		var found []inbox.DeadLetter
		await(t, func() error {
			found = slices.DeleteFunc(scan(t, f, place), func(d inbox.DeadLetter) bool { return d.Class != class })
			if len(found) == 0 {
				return fmt.Errorf("no dead letter of class %s", place)
			}
			return nil
		})
		got := found[0]
		if len(found) != 1 || got.Class != class || got.Error != letter.Error || got.Attempts != 7 || got.Consumer != "suite" ||
			!got.FirstFailedAt.Equal(at) || !got.FailedAt.Equal(letter.FailedAt) || got.Message.Queue != d.Message().Queue {
			t.Errorf("class %s: %d letters, %+v", class, len(found), got)
		}
		if got.ErrorType != letter.ErrorType || got.SQLState != letter.SQLState || got.Fingerprint != letter.Fingerprint {
			t.Errorf("class %s: type %q, SQLSTATE %q, fingerprint %q", class, got.ErrorType, got.SQLState, got.Fingerprint)
		}
		wantEnvelope(t, &got.Message, want)
		wantHistory(t, got.Message.History, letter.Message.History)
	}
	wantNothing(t, s)
	ended(t, s)
}

// A destination that rejects messages fails only their moves, ends no session and loses nothing.
func testMoveRefused(t *testing.T, f SourceFixture) {
	if f.Refuse == nil {
		t.Skip("no destination can be made to reject")
	}
	all := numbered(t, f, 6)
	source := running(t, f)
	s := begin(t, source, 10)
	ds := take(t, s, len(all))
	fix := f.Refuse(t, OwnClass)
	moves := make([]driver.Move, len(ds))
	for i, d := range ds {
		class := []string{OwnClass, driver.ClassDefault}[i%2]
		moves[i] = driver.Move{Delivery: d, Target: driver.ToDead, DeadLetter: driver.NewDeadLetter(d.Message(), driver.Failure{Class: class}, "suite", time.Now())}
	}
	for i, err := range move(t, source, s, moves...) {
		if refused := i%2 == 0; refused != errors.Is(err, driver.ErrRefused) || !refused && err != nil {
			t.Errorf("move %d of class %s: %v", i, moves[i].DeadLetter.Class, err)
		}
	}
	moved(t, source, s, driver.Move{Delivery: ds[0], Target: driver.ToTail, Next: driver.Progress{Attempt: 1}})
	if m := take1(t, s, func(d driver.Delivery) { acked(t, s, d) }); m.ID != all[0].ID {
		t.Errorf("%s at the tail", m.Name)
	}
	fix()
	await(t, func() error { return move(t, source, s, moves[2])[0] })
	noError(t, s.GiveBack(t.Context(), ds[4:5]))
	if m := take1(t, s, func(d driver.Delivery) { acked(t, s, d) }); m.ID != all[4].ID {
		t.Errorf("%s was requeued", m.Name)
	}
	ended(t, s)
	if own, usual := len(scan(t, f, OwnClass)), len(scan(t, f, driver.ClassDefault)); own != 1 || usual != 3 {
		t.Errorf("%d and %d dead letters, want 1 and 3", own, usual)
	}
}

func testMoveWithoutRun(t *testing.T, f SourceFixture) {
	numbered(t, f, 1)
	source := f.New(t)
	s := begin(t, source, 1)
	d := take(t, s, 1)[0]
	if err := source.Move(t.Context(), []driver.Move{later(d, 0, driver.Progress{Attempt: 2})})[0]; !errors.Is(err, driver.ErrUnavailable) {
		t.Errorf("%v, want ErrUnavailable", err)
	}
	run(t, source)
	moved(t, source, s, later(d, 0, driver.Progress{Attempt: 2}))
	if m := take1(t, s, func(d driver.Delivery) { acked(t, s, d) }); m.Attempt != 2 {
		t.Errorf("%+v", m)
	}
	ended(t, s)
}

// A source whose moves settle does not move a message of another session.
func testMoveStale(t *testing.T, f SourceFixture) {
	numbered(t, f, 1)
	source := running(t, f)
	if !source.Traits().MoveSettles {
		t.Skip("its moves need no session")
	}
	s := begin(t, source, 1)
	stale := take(t, s, 1)[0]
	noError(t, s.Close(t.Context()))
	s = begin(t, source, 1)
	d := take(t, s, 1)[0]
	if err := source.Move(t.Context(), []driver.Move{later(stale, 0, driver.Progress{Attempt: 2})})[0]; !errors.Is(err, driver.ErrStale) {
		t.Errorf("%v, want ErrStale", err)
	}
	acked(t, s, d)
	if err := source.Move(t.Context(), []driver.Move{later(d, 0, driver.Progress{Attempt: 2})})[0]; !errors.Is(err, driver.ErrStale) {
		t.Errorf("of an acknowledged one: %v, want ErrStale", err)
	}
	wantNothing(t, s)
	ended(t, s)
}

// A retry and a dead letter belong to one consumer only.
func testMoveForOneConsumer(t *testing.T, f SourceFixture) {
	if f.Another == nil {
		t.Skip("a queue has only one consumer")
	}
	all := numbered(t, f, 2)
	source, other := running(t, f), run(t, f.Another(t))
	s := begin(t, source, 10)
	ds := take(t, s, 2)
	moved(t, source, s, later(ds[0], 100*time.Millisecond, driver.Progress{Attempt: 2}))
	makeDead(t, source, s, driver.ClassDefault, ds[1])
	if m := take1(t, s, func(d driver.Delivery) { acked(t, s, d) }); m.ID != all[0].ID || m.Attempt != 2 {
		t.Errorf("retried %+v", m)
	}
	beside := begin(t, other, 10)
	for _, d := range take(t, beside, 2) {
		if d.Message().Attempt != 1 {
			t.Errorf("another consumer got %+v", d.Message())
		}
		acked(t, beside, d)
	}
	wantNothing(t, beside)
	ended(t, beside)
	ended(t, s)
}

// scan returns the dead letters of a class and keeps them.
func scan(t *testing.T, f SourceFixture, class string) (all []inbox.DeadLetter) {
	t.Helper()
	keep := func(d *inbox.DeadLetter) (driver.Outcome, error) {
		all = append(all, *d)
		return driver.Keep, nil
	}
	await(t, func() error { // slow replies of a server are not tested here
		all = nil
		return f.DeadLetters(t).Scan(t.Context(), class, keep, never(t))
	})
	return all
}

func never(t *testing.T) func(inbox.DeadLetter, error) {
	return func(d inbox.DeadLetter, err error) { t.Errorf("%s: %v", d.Message.Name, err) }
}

// letters creates n dead letters of a class and returns their ids in that order.
func letters(t *testing.T, f SourceFixture, class string, n int) (all []uuid.UUID) {
	t.Helper()
	source := running(t, f)
	s := begin(t, source, 100)
	for len(all) < n {
		some := min(100, n-len(all))
		for _, m := range numbered(t, f, some) {
			all = append(all, m.ID)
		}
		for _, d := range take(t, s, some) {
			makeDead(t, source, s, class, d)
		}
	}
	ended(t, s)
	return all
}
