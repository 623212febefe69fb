package inboxpgx_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
)

// parkCopy processes a message and parks a copy of it behind a dead letter, as happens when the connection is
// lost before the acknowledgements of both. It returns the message.
func parkCopy(t *testing.T, s *inboxpgx.Store) *inbox.Message {
	t.Helper()
	m, head := numbered(0), numbered(1)
	head.Queue = "orders"
	if err := process(t, s, m); err != nil {
		t.Fatal(err)
	}
	dead := driver.NewDeadLetter(head, driver.Classify(inbox.Unrecoverable(errors.New("no"))), "a", time.Now())
	if err := errors.Join(s.Parking(true).Stop(t.Context(), "k", dead), s.Parking(true).Append(t.Context(), "k", m)); err != nil {
		t.Fatal(err)
	}
	return m
}

// goOn removes the dead letter and has the copy behind it processed, as a consumer does.
func goOn(t *testing.T, s *inboxpgx.Store, want uuid.UUID) {
	t.Helper()
	parking, lease := s.Parking(true), driver.Lease{Owner: uuid.New(), For: time.Minute}
	letters := driver.NewDeadLetters(parking, s.Retention(), slog.New(slog.DiscardHandler))
	if n, err := letters.Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "test", Reason: "test"}); n != 1 || err != nil {
		t.Fatalf("%d dead letters removed, error %v", n, err)
	}
	m, _, err := parking.Claim(t.Context(), "k", lease)
	if err != nil || m == nil || m.ID != want {
		t.Fatalf("claimed %v, error %v", m, err)
	}
	if err := errors.Join(process(t, s, m), parking.Done(t.Context(), lease.Owner, m)); err != nil {
		t.Fatal(err)
	}
}

func prune(t *testing.T, s *inboxpgx.Store, want int) {
	t.Helper()
	if n, err := s.Prunable(t.Context()); n != want || err != nil {
		t.Errorf("Prunable = %d, want %d, error %v", n, want, err)
	}
	if n, err := s.Prune(t.Context()); n != want || err != nil {
		t.Errorf("pruned %d, want %d, error %v", n, want, err)
	}
}

// A message that was processed and waits once more, behind a dead letter, is known for as long as it waits.
func TestPruneKeepsWhatIsParked(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := effectStore(t, newManager(t, pool))
	m := parkCopy(t, s)
	other := newStore(t, newManager(t, pool), "b", inboxpgx.Config{})
	handle(t, other, noEffect)
	if err := process(t, other, m); err != nil { // nothing waits there
		t.Fatal(err)
	}
	outlive := func() { exec(t, pool, `UPDATE holdfast_inbox SET processed_at = now() - interval '10 days'`) }
	outlive()
	if err := process(t, s, numbered(2)); err != nil {
		t.Fatal(err)
	}
	prune(t, s, 0)
	prune(t, other, 1)
	if err := s.Check(t.Context()); err != nil {
		t.Errorf("Check: %v", err)
	}
	goOn(t, s, m.ID)
	wantOneEffectEach(t, pool, 2)
	outlive()
	prune(t, s, 2)
}

func TestFakeKeepsWhatIsParked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, entries := fakeStore(t)
		runs := map[int]int{}
		handle(t, s, func(_ context.Context, _ pgx.Tx, e conformance.Event) error { runs[e.Number]++; return nil })
		m := parkCopy(t, s)
		old := numbered(2)
		if err := process(t, s, old); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Hour)
		if err := process(t, s, numbered(3)); err != nil { // when others are written the old ones go
			t.Fatal(err)
		}
		if entries.Seen("a", old.ID) {
			t.Error("what waits nowhere is still known")
		}
		goOn(t, s, m.ID)
		if runs[0] != 1 {
			t.Errorf("%d runs of the message", runs[0])
		}
		time.Sleep(2 * time.Hour)
		if err := process(t, s, numbered(4)); err != nil {
			t.Fatal(err)
		}
		if entries.Seen("a", m.ID) {
			t.Error("the message is known for ever")
		}
	})
}

// parkEntries parks some of the entries.
func parkEntries(t *testing.T, pool *pgxpool.Pool, which string) {
	t.Helper()
	exec(t, pool, `INSERT INTO holdfast_inbox_parked (consumer, key, message_id, replays, name, envelope, body)
		SELECT consumer, 'k', message_id, 0, 'x', '{}', '' FROM holdfast_inbox WHERE `+which)
}
