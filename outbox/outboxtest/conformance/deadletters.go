package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// manyDead is a number of dead letters that needs more than two steps.
const manyDead = 1101

// TestDeadLetters checks the guarantees of outbox.DeadLetters, also for changes of many dead letters.
func TestDeadLetters(t *testing.T, b Backend) {
	for name, fn := range map[string]func(*testing.T, Store){
		"a replay of many reports progress":     replaysInSteps,
		"a replay that is cancelled stops soon": cancelsReplay,
		"two replays return each letter once":   replaysTwice,
		"edited letters return as stored":       replaysEdited,
		"a removal of many reports progress":    removesInSteps,
		"a removal that is cancelled stops":     cancelsRemoval,
		"a filter ignores the case of an error": filtersByError,
		"a list continues after a letter":       listsDeadInPages,
		"a list has bodies only if it is whole": listsContent,
		"a waiting list continues in pages":     listsWaitingInPages,
		"a look finds an unpublished message":   looksAtOne,
	} {
		each(t, b.Bubble, name, func(t *testing.T) { fn(t, b.Open(t)) })
	}
}

func replaysInSteps(t *testing.T, s Store) {
	want := s.deadLetter(t, manyDead)
	var told []int
	got, err := s.DeadLetters.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: "ada", Progress: func(r outbox.Replayed) { told = append(told, r.Returned) }})
	if err != nil || got != (outbox.Replayed{Returned: manyDead}) {
		t.Errorf("%+v, %v", got, err)
	}
	wantSteps(t, told, manyDead)
	s.wantOrder(t, want)
}

func cancelsReplay(t *testing.T, s Store) {
	want := s.deadLetter(t, manyDead)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first, err := s.DeadLetters.Replay(ctx, outbox.Filter{}, outbox.Replay{By: "ada", Progress: func(outbox.Replayed) { cancel() }})
	if !errors.Is(err, context.Canceled) || first.Returned == 0 || first.Returned == manyDead {
		t.Errorf("cancelled after %+v: %v", first, err)
	}
	s.wantDead(t, manyDead-first.Returned)
	second, err := s.DeadLetters.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: "ada"})
	if err != nil || first.Returned+second.Returned != manyDead {
		t.Errorf("%+v and then %+v, %v", first, second, err)
	}
	s.wantOrder(t, want)
}

func replaysTwice(t *testing.T, s Store) {
	want := s.deadLetter(t, manyDead)
	var returned [2]int
	var both sync.WaitGroup
	for i := range returned {
		both.Go(func() {
			got, err := s.DeadLetters.Replay(t.Context(), outbox.Filter{}, outbox.Replay{By: "ada"})
			if err != nil {
				t.Error(err)
			}
			returned[i] = got.Returned
		})
	}
	both.Wait()
	if returned[0]+returned[1] != manyDead {
		t.Errorf("returned %v, want %d together", returned, manyDead)
	}
	s.wantDead(t, 0)
	s.wantOrder(t, want)
}

// Dead letters return in stored order, even if they died in another order. A limit selects those that died first.
func replaysEdited(t *testing.T, s Store) {
	const n = 60
	var msgs []outbox.Message
	for i := range n {
		msgs = append(msgs, message("k", strconv.Itoa(i)))
	}
	s.write(t, msgs...)
	for _, from := range []int{n / 2, 10, 0} {
		b := s.claim(t, driver.Claim{})
		s.settle(t, b, outcomes(driver.Dead, b.Messages[from:]...)...)
	}
	var told []int
	edited, err := s.DeadLetters.Replay(t.Context(), outbox.Filter{Limit: n - 10}, outbox.Replay{
		By:       "ada",
		Edit:     func(m outbox.Message) ([]byte, error) { return append([]byte("1"), m.Body[1:len(m.Body)-1]...), nil },
		Progress: func(r outbox.Replayed) { told = append(told, r.Returned) },
	})
	if err != nil || edited.Returned != n-10 {
		t.Errorf("%+v, %v", edited, err)
	}
	wantSteps(t, told, n-10)
	var want []string
	for i := 10; i < n; i++ {
		want = append(want, "1"+strconv.Itoa(i))
	}
	s.wantOrder(t, map[string][]string{"k": want})
}

func removesInSteps(t *testing.T, s Store) {
	s.deadLetter(t, manyDead)
	before, err := s.DeadLetters.List(t.Context(), outbox.Filter{Limit: manyDead})
	must(t, err)
	const gone = manyDead - 1
	var told []int
	n, err := s.DeadLetters.Remove(t.Context(), outbox.Filter{Limit: gone}, outbox.Removal{By: "ada", Progress: func(removed int) { told = append(told, removed) }})
	if err != nil || n != gone {
		t.Errorf("removed %d, %v", n, err)
	}
	wantSteps(t, told, gone)
	left, err := s.DeadLetters.List(t.Context(), outbox.Filter{})
	if err != nil || len(left) != 1 || left[0].Message.ID != before[gone].Message.ID {
		t.Errorf("left %+v, %v, want the latest, %s", left, err, before[gone].Message.ID)
	}
	s.wantOrder(t, map[string][]string{})
}

func cancelsRemoval(t *testing.T, s Store) {
	s.deadLetter(t, manyDead)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	n, err := s.DeadLetters.Remove(ctx, outbox.Filter{}, outbox.Removal{By: "ada", Progress: func(int) { cancel() }})
	if !errors.Is(err, context.Canceled) || n == 0 || n == manyDead {
		t.Errorf("cancelled after %d: %v", n, err)
	}
	s.wantDead(t, manyDead-n)
}

func filtersByError(t *testing.T, s Store) {
	s.deadLetter(t, 2)
	for text, want := range map[string]int{"SCRIPT": 2, "scriptEd": 2, "scripts": 0} {
		if n, err := s.DeadLetters.Count(t.Context(), outbox.Filter{ErrorContains: text}); err != nil || n != want {
			t.Errorf("%d with %q in their errors, %v, want %d", n, text, err, want)
		}
	}
}

// deadLetter writes messages of seven keys, makes dead letters of them, and returns the bodies of each key.
func (s Store) deadLetter(t *testing.T, n int) map[string][]string {
	t.Helper()
	bodies := map[string][]string{}
	var msgs []outbox.Message
	for i := range n {
		m := message("k"+strconv.Itoa(i%7), strconv.Itoa(i))
		bodies[m.Key] = append(bodies[m.Key], string(m.Body))
		msgs = append(msgs, m)
	}
	s.write(t, msgs...)
	for b := s.claim(t, driver.Claim{}); len(b.Messages) > 0; b = s.claim(t, driver.Claim{}) {
		s.settle(t, b, outcomes(driver.Dead, b.Messages...)...)
	}
	s.wantDead(t, n)
	return bodies
}

func (s Store) wantDead(t *testing.T, want int) {
	t.Helper()
	if n, err := s.DeadLetters.Count(t.Context(), outbox.Filter{}); err != nil || n != want {
		t.Errorf("%d dead letters, %v, want %d", n, err, want)
	}
}

// wantOrder claims everything, and compares the bodies of each key.
func (s Store) wantOrder(t *testing.T, want map[string][]string) {
	t.Helper()
	got := map[string][]string{}
	for b := s.claim(t, driver.Claim{}); len(b.Messages) > 0; b = s.claim(t, driver.Claim{}) {
		for _, m := range b.Messages {
			got[m.Key] = append(got[m.Key], string(m.Body))
		}
		s.settle(t, b, outcomes(driver.Published, b.Messages...)...)
	}
	for key, bodies := range want {
		if !slices.Equal(got[key], bodies) {
			t.Errorf("%s returned as %v, want %v", key, got[key], bodies)
		}
	}
	if len(got) != len(want) {
		t.Errorf("messages of %d keys, want %d", len(got), len(want))
	}
}

// wantSteps checks that there was more than one step, that progress increased, and that the last step reached the
// end.
func wantSteps(t *testing.T, told []int, end int) {
	t.Helper()
	if len(told) < 2 || told[len(told)-1] != end || !slices.IsSorted(told) || len(slices.Compact(slices.Clone(told))) != len(told) {
		t.Errorf("progress %v, want steps to %d", told, end)
	}
}

// listed is an entry of a list with its cursor.
type listed struct {
	id     uuid.UUID
	cursor string
}

// The pages together have each entry of the list once, even if the last entry of a page is removed before the next
// page. Only a list accepts a position.
func listsDeadInPages(t *testing.T, s Store) {
	const n = 23
	s.deadLetter(t, n)
	list := func(f outbox.Filter) (page []listed, err error) {
		found, err := s.DeadLetters.List(t.Context(), f)
		for _, l := range found {
			page = append(page, listed{l.Message.ID, l.Cursor})
		}
		return page, err
	}
	all, err := list(outbox.Filter{})
	if err != nil || len(all) != n {
		t.Fatalf("%d listed, %v", len(all), err)
	}
	wantPages(t, all, func(limit int, after string) ([]listed, error) {
		page, err := list(outbox.Filter{Limit: limit, After: after})
		if len(page) == 0 {
			return page, err
		}
		_, gone := s.DeadLetters.Remove(t.Context(), outbox.Filter{IDs: []uuid.UUID{page[len(page)-1].id}}, outbox.Removal{By: "ada"})
		if gone != nil {
			t.Error(gone)
		}
		return page, err
	})
	after := outbox.Filter{After: all[0].cursor}
	_, err1 := s.DeadLetters.Count(t.Context(), after)
	_, err2 := s.DeadLetters.Groups(t.Context(), after)
	_, err3 := s.DeadLetters.Replay(t.Context(), after, outbox.Replay{By: "ada"})
	_, err4 := s.DeadLetters.Remove(t.Context(), after, outbox.Removal{By: "ada"})
	_, err5 := list(outbox.Filter{After: "the last one"})
	for i, err := range []error{err1, err2, err3, err4, err5} {
		if err == nil {
			t.Errorf("%d: a list position was accepted", i)
		}
	}
}

func listsContent(t *testing.T, s Store) {
	m := message("k", "1")
	m.Headers = map[string]string{"tenant": "a"}
	s.write(t, m)
	b := s.claim(t, driver.Claim{})
	s.settle(t, b, outcomes(driver.Dead, b.Messages...)...)
	for _, whole := range []bool{false, true} {
		found, err := s.DeadLetters.List(t.Context(), outbox.Filter{Whole: whole})
		if err != nil || len(found) != 1 {
			t.Fatalf("%d listed, %v", len(found), err)
		}
		d := found[0]
		if d.Omitted == whole || (len(d.Message.Body) > 0) != whole || (d.Message.Headers["tenant"] == "a") != whole || d.Unreadable != nil || d.Message.Key != "k" {
			t.Errorf("whole %v: %+v", whole, d)
		}
	}
}

func listsWaitingInPages(t *testing.T, s Store) {
	store, ok := s.Source.(interface {
		Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error)
	})
	if !ok {
		t.Fatal("the store has no list of waiting messages")
	}
	const n = 23
	var msgs []outbox.Message
	for i := range n {
		later := message("", strconv.Itoa(i))
		later.NotBefore = time.Now().Add(time.Hour) // timing: when a message is due
		msgs = append(msgs, later, message(fmt.Sprint(i%3), strconv.Itoa(i)))
	}
	s.write(t, msgs...)
	list := func(limit int, after string) (page []listed, err error) {
		found, err := store.Waiting(t.Context(), outbox.WaitingFilter{Limit: limit, After: after})
		for _, w := range found {
			if w.Body != nil {
				t.Errorf("message %s is listed with a body of %d bytes", w.ID, len(w.Body))
			}
			page = append(page, listed{w.ID, w.Cursor})
		}
		return page, err
	}
	all, err := list(0, "")
	if err != nil || len(all) != n {
		t.Fatalf("%d listed, %v", len(all), err)
	}
	wantPages(t, all, list)
	if _, err := list(1, "the last one"); err == nil {
		t.Error("an invalid list position was accepted")
	}
}

// A look finds a message while it waits, and not once it is a dead letter.
func looksAtOne(t *testing.T, s Store) {
	store, ok := s.Source.(interface {
		Look(ctx context.Context, id uuid.UUID) (driver.Known, error)
	})
	if !ok {
		t.Fatal("the store does not look at one message")
	}
	s.write(t, message("", "0"), message("k", "1"))
	b := s.claim(t, driver.Claim{})
	failed, other := b.Messages[0], b.Messages[1]
	look := func(want string) {
		t.Helper()
		k, err := store.Look(t.Context(), failed.ID)
		got := fmt.Sprintf("%s %d %s %s", k.Body, k.Attempts, k.Class, k.Error)
		if err != nil || !k.PublishedAt.IsZero() || k.CreatedAt.IsZero() || got != want || k.DueAt.IsZero() == (k.Attempts > 0) {
			t.Errorf("found %s at %v, due at %v, published at %v, %v; want %s", got, k.CreatedAt, k.DueAt, k.PublishedAt, err, want)
		}
	}
	look(string(failed.Body) + " 0  ")
	s.settle(t, b,
		driver.Settlement{ID: failed.ID, Verdict: driver.Failed, Delay: time.Hour, Class: driver.Retryable, Err: "no route"},
		driver.Settlement{ID: other.ID, Verdict: driver.Dead, Class: driver.Permanent, Err: "no exchange"})
	look(string(failed.Body) + " 1 " + string(driver.Retryable) + " no route")
	for _, id := range []uuid.UUID{other.ID, uuid.New()} {
		if found, err := store.Look(t.Context(), id); !errors.Is(err, outbox.ErrNotFound) {
			t.Errorf("found %+v, %v", found, err)
		}
	}
}

// wantPages reads a list in pages and compares it with the whole list.
func wantPages(t *testing.T, all []listed, list func(limit int, after string) ([]listed, error)) {
	t.Helper()
	got, err := inPages(len(all), list)
	must(t, err)
	if !slices.Equal(got, all) {
		t.Errorf("the pages have %d entries: %v, want %v", len(got), got, all)
	}
}

// inPages reads a list in pages. It stops after the page that exceeds most entries, because a store that ignores the
// position has no last page.
func inPages(most int, list func(limit int, after string) ([]listed, error)) (got []listed, err error) {
	const limit = 7
	for after := ""; len(got) <= most; after = got[len(got)-1].cursor {
		page, err := list(limit, after)
		if err != nil {
			return got, err
		}
		got = append(got, page...)
		if len(page) < limit {
			break
		}
	}
	return got, nil
}
