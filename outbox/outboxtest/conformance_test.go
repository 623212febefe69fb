package outboxtest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestStore(t *testing.T) {
	backend := conformance.Backend{Bubble: true, Open: open}
	t.Run("writer", func(t *testing.T) { conformance.TestWriter(t, backend) })
	t.Run("source", func(t *testing.T) { conformance.TestSource(t, backend) })
	t.Run("dead letters", func(t *testing.T) { conformance.TestDeadLetters(t, backend) })
	t.Run("parked", func(t *testing.T) { conformance.TestParked(t, backend) })
}

func TestManagedWriter(t *testing.T) {
	conformance.TestManagedWriter(t, conformance.ManagedBackend{Bubble: true, Open: func(*testing.T) conformance.Managed {
		manager, store := txretrytest.New(txretrytest.Config{}), outboxtest.New()
		return conformance.Managed{
			Store: over(manager, store), Manager: manager, Write: store.Write, WriteOnce: store.WriteOnce,
			Break: func(_ context.Context, tx pgx.Tx) error {
				return txretrytest.Fail(tx, &pgconn.PgError{Severity: "ERROR", Code: "22012"})
			},
		}
	}})
}

func open(*testing.T) conformance.Store {
	return over(txretrytest.New(txretrytest.Config{}), outboxtest.New())
}

func over(manager *txretrytest.Manager, store *outboxtest.Store) conformance.Store {
	return conformance.Store{
		Source: store,
		InTx: func(ctx context.Context, fn func(func(...outbox.Message) error) error) error {
			return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
				return fn(func(msgs ...outbox.Message) error { return store.Write(ctx, tx, msgs...) })
			})
		},
		OnceInTx: func(ctx context.Context, fn func(conformance.Once) error) error {
			return manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
				return fn(func(key string, m outbox.Message) (uuid.UUID, bool, error) { return store.WriteOnce(ctx, tx, key, m) })
			})
		},
		DeadLetters: store.DeadLetters(), Parked: store.Parked(),
	}
}

func TestPublisher(t *testing.T) {
	conformance.TestPublisher(t, conformance.PublisherBackend{Bubble: true, Open: func(*testing.T) conformance.PublisherCase {
		p := outboxtest.NewPublisher()
		unroutable := driver.Message{Name: "nobody.listens"}
		broken := false
		p.Respond(func(m driver.Message) error {
			switch {
			case broken:
				return &driver.PublishError{Class: driver.Unavailable}
			case m.Name == unroutable.Name:
				return &driver.PublishError{Class: driver.Unroutable}
			}
			return nil
		})
		return conformance.PublisherCase{
			Publisher:  p,
			Received:   func(context.Context) ([]driver.Message, error) { return p.Received(), nil },
			Unroutable: unroutable,
			Break:      func() { broken = true },
			Fix:        func() { broken = false },
		}
	}})
}

func TestStoreShowsNothingUncommitted(t *testing.T) {
	for _, tc := range []struct {
		point txretrytest.Point
		want  int
	}{
		{txretrytest.ReplyLostApplied, 1},
		{txretrytest.ReplyLostNotApplied, 0},
	} {
		manager := txretrytest.New(txretrytest.Config{Script: []txretrytest.Fault{{Point: tc.point}}})
		store := outboxtest.New()
		err := manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			if err := store.Write(ctx, tx, outbox.Message{Name: "a", Body: []byte("1")}); err != nil {
				return err
			}
			batch, err := store.Claim(ctx, driver.Claim{Limit: 1, Lease: 1})
			if len(batch.Messages) > 0 {
				t.Error("claimed before the commit")
			}
			return err
		})
		if err == nil {
			t.Error("the reply was not lost")
		}
		if got := len(store.Pending()); got != tc.want {
			t.Errorf("%v: %d messages committed, want %d", tc.point, got, tc.want)
		}
	}
}

func TestStoreRefusesARealTransaction(t *testing.T) {
	store := outboxtest.New()
	for _, tx := range []pgx.Tx{nil, struct{ pgx.Tx }{}} {
		if err := store.Write(t.Context(), tx, outbox.Message{Name: "a", Body: []byte("1")}); err == nil {
			t.Errorf("accepted %T", tx)
		}
	}
}

func TestDeadLetters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := outboxtest.New()
		manager := txretrytest.New(txretrytest.Config{})
		dead := store.DeadLetters()
		for n := range 3 {
			m := outbox.Message{Name: "a", Key: fmt.Sprint(n), Body: []byte("1")}
			if err := manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) }); err != nil {
				t.Fatal(err)
			}
			deadLetter(t, store)
			time.Sleep(4 * 24 * time.Hour)
		}
		letters, err := dead.List(t.Context(), outbox.Filter{FailedAfter: time.Now().Add(-9 * 24 * time.Hour), Limit: 2})
		if err != nil || len(letters) != 2 || letters[0].Message.Key != "1" || letters[0].Class != "permanent" || letters[0].Error != "no" || letters[0].Attempts != 1 {
			t.Fatalf("List: %+v, %v", letters, err)
		}
		for _, tc := range []struct {
			filter outbox.Filter
			replay outbox.Replay
			want   outbox.Replayed
		}{
			{outbox.Filter{}, outbox.Replay{DryRun: true}, outbox.Replayed{Returned: 2, Outlived: 1}},
			{outbox.Filter{Key: "2"}, outbox.Replay{By: "me"}, outbox.Replayed{Returned: 1}},
			{outbox.Filter{}, outbox.Replay{By: "me", Force: true, PerSecond: 1}, outbox.Replayed{Returned: 2}},
		} {
			got, err := dead.Replay(t.Context(), tc.filter, tc.replay)
			if got != tc.want || errors.Is(err, outbox.ErrOutlived) != (tc.want.Outlived > 0) {
				t.Errorf("Replay(%+v, %+v) = %+v, %v", tc.filter, tc.replay, got, err)
			}
		}
		depth, err := store.Depth(t.Context())
		if err != nil || depth.Ready != 2 || depth.Parked != 1 || depth.Dead != 0 {
			t.Errorf("after the replays: %+v, %v", depth, err)
		}
		if _, err := dead.Show(t.Context(), letters[0].Message.ID); !errors.Is(err, outbox.ErrNotFound) {
			t.Errorf("Show of a removed dead letter: %v", err)
		}
		deadLetter(t, store)
		if _, err := dead.Remove(t.Context(), outbox.Filter{}, outbox.Removal{}); err == nil {
			t.Error("Remove without By was accepted")
		}
		if n, err := dead.Remove(t.Context(), outbox.Filter{Limit: 1}, outbox.Removal{By: "me"}); n != 1 || err != nil {
			t.Errorf("Remove = %d, %v", n, err)
		}
		if n, err := dead.Count(t.Context(), outbox.Filter{}); n != 1 || err != nil {
			t.Errorf("Count = %d, %v", n, err)
		}
	})
}

// deadLetter makes dead letters of all ready messages.
func deadLetter(t *testing.T, store *outboxtest.Store) {
	t.Helper()
	batch, err := store.Claim(t.Context(), driver.Claim{Limit: 10, Lease: time.Minute})
	var settlements []driver.Settlement
	for _, m := range batch.Messages {
		settlements = append(settlements, driver.Settlement{ID: m.ID, Verdict: driver.Dead, Class: driver.Permanent, Err: "no"})
	}
	_, err2 := store.Settle(t.Context(), batch, settlements)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
}

// A commit wakes a relay of the Store, or the next relay if the first does not poll. A rollback wakes none. Nothing
// outlives Run.
func TestWakeUps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, manager := outboxtest.New(), txretrytest.New(txretrytest.Config{})
		began, asked, woken := true, 0, 0
		ctx, stop := context.WithCancel(t.Context())
		go store.Background(ctx, func() bool {
			asked++
			if began {
				began = false
				store.Wake() // like a commit at that moment
			}
			return false
		})
		synctest.Wait()
		if asked != 2 {
			t.Errorf("woken %d times at the start and by a commit at that moment, want 2", asked)
		}
		go store.Background(ctx, func() bool { woken++; return true })
		synctest.Wait()
		if woken != 1 {
			t.Errorf("woken %d times at the start, want 1", woken)
		}
		asked, woken = 0, 0
		write := func(ctx context.Context, tx pgx.Tx) error {
			return store.Write(ctx, tx, outbox.Message{Name: "a", Body: []byte("1")})
		}
		err := errors.Join(
			manager.Do(ctx, write),
			manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
				savepoint, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				return errors.Join(write(ctx, savepoint), savepoint.Rollback(ctx))
			}),
		)
		if err != nil || asked != 1 || woken != 1 {
			t.Errorf("first relay called %d times, second %d times by one commit, %v", asked, woken, err)
		}
		stop()
		synctest.Wait()
		store.Wake()
		if asked != 1 || woken != 1 {
			t.Error("woken up after the end of Background")
		}
	})
}

// A dead letter is published with its edited body. One that cannot be edited stays.
func TestEditedDeadLetters(t *testing.T) {
	store := outboxtest.New()
	dead := store.DeadLetters()
	for _, name := range []string{"a", "b"} {
		m := outbox.Message{Name: name, Body: []byte("1")}
		err := txretrytest.New(txretrytest.Config{}).Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) })
		if err != nil {
			t.Fatal(err)
		}
	}
	deadLetter(t, store)
	no := errors.New("no")
	edit := func(m outbox.Message) ([]byte, error) {
		if m.Name == "b" {
			return nil, no
		}
		return []byte("2"), nil
	}
	for _, r := range []outbox.Replay{{DryRun: true, Edit: edit}, {By: "me", Edit: edit}} {
		if got, err := dead.Replay(t.Context(), outbox.Filter{}, r); got != (outbox.Replayed{Returned: 1, Failed: 1}) || !errors.Is(err, no) {
			t.Errorf("%+v, %v", got, err)
		}
	}
	waiting, err := store.Waiting(t.Context(), outbox.WaitingFilter{})
	if err != nil || len(waiting) != 1 {
		t.Fatalf("waiting %+v, %v", waiting, err)
	}
	if found, err := store.Look(t.Context(), waiting[0].ID); err != nil || string(found.Body) != "2" {
		t.Errorf("found %+v, %v", found, err)
	}
}
