package conformance

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

func later(d driver.Delivery, delay time.Duration, next driver.Progress) driver.Move {
	return driver.Move{Delivery: d, Target: driver.ToLater, Delay: delay, Next: next}
}

// Not before its delay.
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
	for range len(delays) - 1 { // the last one is for tomorrow
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

// A retry is the message as it was, with what is known of its attempts.
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

// take1 receives one message and has it settled.
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

// One place for each class, that of default for those that have none; the letter says all that is
// known.
func testMoveDead(t *testing.T, f SourceFixture) {
	source := running(t, f)
	s := begin(t, source, 10)
	at := time.Now().Add(-time.Minute).Truncate(time.Millisecond)
	for class, place := range map[string]string{
		driver.ClassValidation: driver.ClassValidation, OwnClass: OwnClass, "unheard-of": driver.ClassDefault,
	} {
		want := full()
		f.Publish(t, want)
		d := take(t, s, 1)[0]
		letter := inbox.DeadLetter{
			Message: *d.Message(), Class: class, Error: "ü: \"broken\"\nat last", Attempts: 7, FirstFailedAt: at, FailedAt: at.Add(30 * time.Second), Consumer: "suite",
			ErrorType: "*pgconn.PgError", SQLState: "40P01", Fingerprint: "0123456789abcdef",
		}
		letter.Message.History = []inbox.FailedAttempt{{At: at, Error: "at first", Consumer: "billing"}}
		moved(t, source, s, driver.Move{Delivery: d, Target: driver.ToDead, Letter: letter})
		var found []inbox.DeadLetter
		await(t, func() error {
			found = scan(t, f, place)
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

// A place that takes nothing fails its messages alone, ends no session and loses nothing.
func testMoveRefused(t *testing.T, f SourceFixture) {
	if f.Refuse == nil {
		t.Skip("no place can be made to refuse")
	}
	all := numbered(t, f, 6)
	source := running(t, f)
	s := begin(t, source, 10)
	ds := take(t, s, len(all))
	mend := f.Refuse(t, OwnClass)
	moves := make([]driver.Move, len(ds))
	for i, d := range ds {
		class := []string{OwnClass, driver.ClassDefault}[i%2]
		moves[i] = driver.Move{Delivery: d, Target: driver.ToDead, Letter: driver.NewDeadLetter(d.Message(), driver.Failure{Class: class}, "suite", time.Now())}
	}
	for i, err := range move(t, source, s, moves...) {
		if refused := i%2 == 0; refused != errors.Is(err, driver.ErrRefused) || !refused && err != nil {
			t.Errorf("move %d of class %s: %v", i, moves[i].Letter.Class, err)
		}
	}
	moved(t, source, s, driver.Move{Delivery: ds[0], Target: driver.ToTail, Next: driver.Progress{Attempt: 1}})
	if m := take1(t, s, func(d driver.Delivery) { acked(t, s, d) }); m.ID != all[0].ID {
		t.Errorf("%s at the tail", m.Name)
	}
	mend()
	await(t, func() error { return move(t, source, s, moves[2])[0] })
	noError(t, s.GiveBack(t.Context(), ds[4:5]))
	if m := take1(t, s, func(d driver.Delivery) { acked(t, s, d) }); m.ID != all[4].ID {
		t.Errorf("%s was given back", m.Name)
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

// A source whose moves settle moves nothing that is no longer its own.
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

// A retry and a dead letter are of one consumer alone.
func testMoveForOneConsumer(t *testing.T, f SourceFixture) {
	if f.Another == nil {
		t.Skip("there is one consumer of a queue")
	}
	all := numbered(t, f, 2)
	source, other := running(t, f), run(t, f.Another(t))
	s := begin(t, source, 10)
	ds := take(t, s, 2)
	moved(t, source, s, later(ds[0], 100*time.Millisecond, driver.Progress{Attempt: 2}))
	bury(t, source, s, driver.ClassDefault, ds[1])
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

// scan returns the dead letters of a class and leaves them.
func scan(t *testing.T, f SourceFixture, class string) (all []inbox.DeadLetter) {
	t.Helper()
	keep := func(d *inbox.DeadLetter) (driver.Fate, error) {
		all = append(all, *d)
		return driver.Keep, nil
	}
	await(t, func() error { // a server that is slow to answer is not what is tested
		all = nil
		return f.Letters(t).Scan(t.Context(), class, keep, never(t))
	})
	return all
}

func never(t *testing.T) func(inbox.DeadLetter, error) {
	return func(d inbox.DeadLetter, err error) { t.Errorf("%s: %v", d.Message.Name, err) }
}

// letters makes so many dead letters of a class and returns their ids in that order.
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
			bury(t, source, s, class, d)
		}
	}
	ended(t, s)
	return all
}
