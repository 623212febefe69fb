package conformance

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// listed is an entry of a list, and where it is in it.
type listed struct {
	id     uuid.UUID
	cursor string
}

// A list in pages is the list, each entry once, also where the last one of a page is gone when the next page is
// asked for. Only a list has a place to begin.
func listsDeadInPages(t *testing.T, s Store) {
	const n = 23
	s.deadLetter(t, n)
	list := func(f outbox.Filter) (page []listed, err error) {
		letters, err := s.DeadLetters.List(t.Context(), f)
		for _, l := range letters {
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
			t.Errorf("%d: a place in a list is accepted", i)
		}
	}
}

func listsWaitingInPages(t *testing.T, s Store) {
	store, ok := s.Source.(interface {
		Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error)
	})
	if !ok {
		t.Fatal("the store does not list what waits")
	}
	const n = 23
	var msgs []outbox.Message
	for i := range n {
		later := message("", strconv.Itoa(i))
		later.NotBefore = time.Now().Add(time.Duration(1+i/5) * time.Hour) // timing: when a message is due
		msgs = append(msgs, later, message(fmt.Sprint(i%3), strconv.Itoa(i)))
	}
	s.write(t, msgs...)
	for _, parked := range []bool{false, true} {
		list := func(limit int, after string) (page []listed, err error) {
			found, err := store.Waiting(t.Context(), outbox.WaitingFilter{Parked: parked, Limit: limit, After: after})
			for _, w := range found {
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
			t.Error("what is no place in a list is accepted")
		}
	}
}

// A message that waits after an attempt has the class and the error of that attempt.
func listsWhyMessagesWait(t *testing.T, s Store) {
	store, ok := s.Source.(interface {
		Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error)
	})
	if !ok {
		t.Fatal("the store does not list what waits")
	}
	s.write(t, message("", "0"))
	b := s.claimAlone(t, driver.Claim{Limit: 1})
	s.settle(t, b, driver.Settlement{ID: b.Messages[0].ID, Verdict: driver.Failed, Delay: time.Hour, Class: driver.Retryable, Err: "no route"})
	found, err := store.Waiting(t.Context(), outbox.WaitingFilter{Parked: true})
	if err != nil || len(found) != 1 || found[0].Class != string(driver.Retryable) || found[0].Error != "no route" || found[0].Attempts != 1 {
		t.Errorf("listed %+v, %v", found, err)
	}
}

// wantPages goes through a list in pages.
func wantPages(t *testing.T, all []listed, list func(limit int, after string) ([]listed, error)) {
	t.Helper()
	got, err := inPages(len(all), list)
	must(t, err)
	if !slices.Equal(got, all) {
		t.Errorf("in pages %d are listed: %v, want %v", len(got), got, all)
	}
}

// inPages returns a list that it asks for in pages. It stops behind the page with which there are more than most: a
// store that takes no notice of the place in its list has no last page.
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
