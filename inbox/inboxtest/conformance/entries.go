package conformance

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/txretry"
)

// EntriesBackend configures TestEntries.
type EntriesBackend struct {
	// Bubble runs each test in a testing/synctest bubble.
	Bubble bool
	// New returns a transactor, and empty Entries that work on its transactions.
	New func(t *testing.T) (txretry.Transactor, driver.Entries)
}

// TestEntries tests the contract of a driver.Entries.
func TestEntries(t *testing.T, b EntriesBackend) {
	for name, test := range map[string]func(*testing.T, entriesTester){
		"first and second":        testFirstAndSecond,
		"rollback forgets":        testRollbackForgets,
		"within a transaction":    testWithinTransaction,
		"savepoint":               testSavepoint,
		"several":                 testRecordAll,
		"forget":                  testForget,
		"closed transaction":      testClosedTransaction,
		"consumers":               testConsumersApart,
		"concurrent transactions": testConcurrentRecords,
		"stopped keys":            testStoppedKeys,
		"look":                    testLook,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run := func(t *testing.T) {
				tx, entries := b.New(t)
				test(t, entriesTester{tx, entries})
			}
			if b.Bubble {
				synctest.Test(t, run)
				return
			}
			run(t)
		})
	}
}

type entriesTester struct {
	transactor txretry.Transactor
	entries    driver.Entries
}

var errAbort = errors.New("abort")

// record records an id in a transaction of its own and ends it with the given error.
func (d entriesTester) record(t *testing.T, consumer string, id uuid.UUID, end error) (first bool) {
	t.Helper()
	err := d.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) (err error) {
		if first, err = d.entries.Record(ctx, tx, consumer, id, ""); err != nil {
			return err
		}
		return end
	})
	if !errors.Is(err, end) || (end == nil && err != nil) {
		t.Fatalf("transaction ended with %v, want %v", err, end)
	}
	return first
}

func (d entriesTester) want(t *testing.T, consumer string, id uuid.UUID, want bool) {
	t.Helper()
	if got := d.record(t, consumer, id, nil); got != want {
		t.Errorf("Record(%s) = %v, want %v", consumer, got, want)
	}
}

func testFirstAndSecond(t *testing.T, d entriesTester) {
	id := ids.New()
	d.want(t, "a", id, true)
	d.want(t, "a", id, false)
	d.want(t, "a", ids.New(), true)
}

func testRollbackForgets(t *testing.T, d entriesTester) {
	id := ids.New()
	if !d.record(t, "a", id, errAbort) {
		t.Error("the first Record found an entry")
	}
	d.want(t, "a", id, true)
}

func testWithinTransaction(t *testing.T, d entriesTester) {
	id := ids.New()
	err := d.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		for _, want := range []bool{true, false} {
			first, err := d.entries.Record(ctx, tx, "a", id, "")
			if err != nil {
				return err
			}
			if first != want {
				t.Errorf("Record = %v, want %v", first, want)
			}
		}
		return nil
	})
	noError(t, err)
}

func testSavepoint(t *testing.T, d entriesTester) {
	kept, dropped := ids.New(), ids.New()
	err := d.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		if _, err := d.entries.Record(ctx, tx, "a", kept, ""); err != nil {
			return err
		}
		err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
			if _, err := d.entries.Record(ctx, tx, "a", dropped, ""); err != nil {
				return err
			}
			return errAbort
		})
		if !errors.Is(err, errAbort) {
			return err
		}
		return nil
	})
	noError(t, err)
	d.want(t, "a", kept, false)
	d.want(t, "a", dropped, true)
}

func testRecordAll(t *testing.T, d entriesTester) {
	known := event(1)
	d.want(t, "a", known.ID, true)
	msgs := []*inbox.Message{event(2), known, event(3)}
	err := d.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		first, err := d.entries.RecordAll(ctx, tx, "a", msgs, nil)
		if err != nil {
			return err
		}
		if !slices.Equal(first, []bool{true, false, true}) {
			t.Errorf("RecordAll = %v", first)
		}
		return nil
	})
	noError(t, err)
	for _, m := range msgs {
		d.want(t, "a", m.ID, false)
		d.want(t, "b", m.ID, true)
	}
}

func testForget(t *testing.T, d entriesTester) {
	kept, dropped, undone := event(1), event(2), event(3)
	record := func(end error, forget *inbox.Message, msgs ...*inbox.Message) {
		t.Helper()
		err := d.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			if _, err := d.entries.RecordAll(ctx, tx, "a", msgs, nil); err != nil {
				return err
			}
			if err := d.entries.Forget(ctx, tx, "a", []uuid.UUID{forget.ID}); err != nil {
				return err
			}
			return end
		})
		if !errors.Is(err, end) {
			t.Fatal(err)
		}
	}
	record(nil, dropped, kept, dropped)
	record(errAbort, undone, undone)
	d.want(t, "a", kept.ID, false)
	d.want(t, "a", dropped.ID, true)
	d.want(t, "a", undone.ID, true)
}

func testClosedTransaction(t *testing.T, d entriesTester) {
	id := ids.New()
	var closed pgx.Tx
	err := d.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		closed = tx
		_, err := d.entries.Record(ctx, tx, "a", id, "")
		return err
	})
	noError(t, err)
	for _, id := range []uuid.UUID{id, ids.New()} {
		if first, err := d.entries.Record(t.Context(), closed, "a", id, ""); err == nil || first {
			t.Errorf("Record in a closed transaction = %v, %v", first, err)
		}
	}
}

func testConsumersApart(t *testing.T, d entriesTester) {
	id := ids.New()
	d.want(t, "a", id, true)
	d.want(t, "b", id, true)
	d.want(t, "a", id, false)
}

func testConcurrentRecords(t *testing.T, d entriesTester) {
	const n = 8
	id := ids.New()
	firsts := make(chan bool, n)
	for range n {
		go func() {
			var first bool
			err := d.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) (err error) {
				first, err = d.entries.Record(ctx, tx, "a", id, "")
				return err
			})
			if err != nil {
				t.Error(err)
			}
			firsts <- first && err == nil
		}()
	}
	count := 0
	for range n {
		if <-firsts {
			count++
		}
	}
	if count != 1 {
		t.Errorf("%d of %d transactions were the first", count, n)
	}
}

// A message of a stopped key has no entry. Other keys, other consumers and messages without a key have one.
func testStoppedKeys(t *testing.T, d entriesTester) {
	stops := event(1)
	noError(t, d.entries.Parking("a").Stop(t.Context(), "k", driverLetter(stops, errNo)))
	record := func(consumer string, keys []string, want ...bool) {
		t.Helper()
		err := d.transactor.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			msgs := make([]*inbox.Message, len(want))
			for i := range msgs {
				msgs[i] = event(10 + i)
			}
			first, err := d.entries.RecordAll(ctx, tx, consumer, msgs, keys)
			if !slices.Equal(first, want) {
				t.Errorf("RecordAll of %q: %v, want %v", keys, first, want)
			}
			for i, m := range []*inbox.Message{event(20), stops} {
				if keys == nil || err != nil {
					break
				}
				var one bool
				if one, err = d.entries.Record(ctx, tx, consumer, m.ID, keys[0]); one != want[0] {
					t.Errorf("Record %d of %q: %v, want %v", i, keys[0], one, want[0])
				}
			}
			return err
		})
		noError(t, err)
	}
	record("a", []string{"k", "other", ""}, false, true, true)
	record("b", []string{"k"}, true)
	record("a", nil, true)
}

// A look returns when a message took effect or was parked, and the dead letter of its key, for one consumer.
func testLook(t *testing.T, d entriesTester) {
	processed, stops, waits := event(1), event(2), event(3)
	d.want(t, "a", processed.ID, true)
	place := d.entries.Parking("a")
	noError(t, place.Stop(t.Context(), "k", driverLetter(stops, errNo)))
	if in, err := place.Wait(t.Context(), "k", waits, false); !in || err != nil {
		t.Fatalf("it waits: %v, %v", in, err)
	}
	for _, c := range []struct {
		consumer          string
		message           *inbox.Message
		processed, parked bool
		stoppedBy         uuid.UUID
	}{
		{"a", processed, true, false, uuid.Nil},
		{"a", stops, false, true, stops.ID},
		{"a", waits, false, true, stops.ID},
		{"a", event(4), false, false, uuid.Nil},
		{"b", processed, false, false, uuid.Nil},
		{"b", waits, false, false, uuid.Nil},
	} {
		known, err := d.entries.Look(t.Context(), c.consumer, c.message.ID)
		if err != nil || known.ProcessedAt.IsZero() == c.processed || known.ParkedAt.IsZero() == c.parked || known.StoppedBy != c.stoppedBy {
			t.Errorf("%s knows %+v of %s, %v; want processed %v, parked %v, by %s", c.consumer, known, c.message.Body, err, c.processed, c.parked, c.stoppedBy)
		}
	}
}
