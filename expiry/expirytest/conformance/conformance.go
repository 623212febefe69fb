// Package conformance is the suite that every driver.Store passes: the fake and
// the adapters, and yours.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
)

// Emit is the callback of a store: called in the transaction of the batch with
// the rows that were expired.
type Emit func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error

// Backend is one empty set of rows, for one test.
type Backend interface {
	// Store returns a store on the rows that calls emit.
	Store(t *testing.T, emit Emit) driver.Store
	// Put writes a row, new or not, whose deadline is in the given time by the
	// store's clock.
	Put(t *testing.T, id, state string, in time.Duration)
	// State returns the state of a row.
	State(t *testing.T, id string) string
	// Announce records in the transaction that the row expired, as an outbox does.
	Announce(ctx context.Context, tx pgx.Tx, row expiry.Row) error
	// Announced returns how often that was committed.
	Announced(t *testing.T, id string) int
	// Fail runs a statement that fails with an SQLSTATE, and returns its error.
	Fail(ctx context.Context, tx pgx.Tx, sqlState string) error
}

const (
	held      = "held"
	expired   = "expired"
	confirmed = "confirmed"
)

// Test runs the suite. open returns a fresh backend; run runs a subtest's body,
// in a synctest bubble or as it is.
func Test(t *testing.T, open func(t *testing.T) Backend, run func(t *testing.T, body func(t *testing.T))) {
	for name, test := range map[string]func(t *testing.T, b Backend){
		"OnlyWhatIsDueExpires":       testOnlyDue,
		"LimitAndOrder":              testLimitAndOrder,
		"SkippedRowsAreLeftAlone":    testSkip,
		"OnlyTheseRows":              testOnly,
		"AfterACursor":               testAfter,
		"RepeatedBatchHasTheSameIDs": testRepeated,
		"NamedRowIsBlamed":           testNamed,
		"FailedBatchChangesNothing":  testFailedBatch,
		"PanicIsAnError":             testPanic,
		"FailedStatements":           testFailedStatements,
		"RowThatIsNotToBlame":        testNotToBlame,
		"LookAhead":                  testLook,
		"BadLimitIsRefused":          testBadLimit,
		"SweepDrains":                testDrain,
		"PoisonRowsDoNotStopTheRest": testPoison,
		"SweepersSideBySide":         testSideBySide,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, func(t *testing.T) { test(t, open(t)) })
		})
	}
}

func announce(b Backend) Emit {
	return func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		for _, row := range rows {
			if err := b.Announce(ctx, tx, row); err != nil {
				return err
			}
		}
		return nil
	}
}

func id(n int) string { return fmt.Sprintf("row-%05d", n) }

func expect(t *testing.T, b Backend, id, state string, announced int) {
	t.Helper()
	if got := b.State(t, id); got != state {
		t.Errorf("row %s is %s, want %s", id, got, state)
	}
	if got := b.Announced(t, id); got != announced {
		t.Errorf("row %s was announced %d times, want %d", id, got, announced)
	}
}

func sweepBatch(t *testing.T, s driver.Store, req driver.Request) driver.Batch {
	t.Helper()
	batch, err := s.SweepBatch(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return batch
}

func testOnlyDue(t *testing.T, b Backend) {
	s := b.Store(t, announce(b))
	b.Put(t, "due", held, -time.Minute)
	b.Put(t, "early", held, time.Hour)
	b.Put(t, "sold", confirmed, -time.Minute)
	b.Put(t, "gone", expired, -time.Minute)

	batch := sweepBatch(t, s, driver.Request{Limit: 10})
	if batch.Claimed != 1 || batch.Expired != 1 {
		t.Errorf("got %+v, want one row", batch)
	}
	if batch.Lag < time.Minute || batch.Lag > 2*time.Minute {
		t.Errorf("lag is %v, want about a minute", batch.Lag)
	}
	expect(t, b, "due", expired, 1)
	expect(t, b, "early", held, 0)
	expect(t, b, "sold", confirmed, 0)
	expect(t, b, "gone", expired, 0)

	if batch.Last.ID != "due" || batch.Last.Deadline.IsZero() {
		t.Errorf("the last row is %+v, want the only one", batch.Last)
	}

	if again := sweepBatch(t, s, driver.Request{Limit: 10}); again != (driver.Batch{}) {
		t.Errorf("second batch did %+v, want nothing", again)
	}
	expect(t, b, "due", expired, 1)
}

func testLimitAndOrder(t *testing.T, b Backend) {
	var order []string
	s := b.Store(t, func(_ context.Context, _ pgx.Tx, rows []expiry.Row) error {
		for _, row := range rows {
			if row.Deadline.IsZero() {
				t.Errorf("row %s came without its deadline", row.ID)
			}
			order = append(order, row.ID)
		}
		return nil
	})
	b.Put(t, "c", held, -1*time.Minute)
	b.Put(t, "a", held, -2*time.Minute)
	b.Put(t, "b", held, -3*time.Minute)
	for _, want := range []int{2, 1, 0} {
		if batch := sweepBatch(t, s, driver.Request{Limit: 2}); batch.Claimed != want || batch.Expired != want {
			t.Errorf("got %+v, want %d rows", batch, want)
		}
	}
	if want := []string{"b", "a", "c"}; !slices.Equal(order, want) {
		t.Errorf("expired in the order %v, want %v", order, want)
	}
}

func testSkip(t *testing.T, b Backend) {
	s := b.Store(t, announce(b))
	odd := `odd "one", {with} \ 'marks'`
	b.Put(t, odd, held, -2*time.Minute)
	b.Put(t, "plain", held, -time.Minute)
	if batch := sweepBatch(t, s, driver.Request{Limit: 10, Skip: []string{odd, "unknown"}}); batch.Expired != 1 {
		t.Errorf("got %+v, want one row", batch)
	}
	expect(t, b, odd, held, 0)
	expect(t, b, "plain", expired, 1)
	sweepBatch(t, s, driver.Request{Limit: 10})
	expect(t, b, odd, expired, 1)
}

func testFailedBatch(t *testing.T, b Backend) {
	cause := errors.New("cannot announce")
	s := b.Store(t, func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		return errors.Join(announce(b)(ctx, tx, rows), cause)
	})
	b.Put(t, "one", held, -2*time.Minute)
	b.Put(t, "two", held, -time.Minute)
	_, err := s.SweepBatch(t.Context(), driver.Request{Limit: 10})
	var blamed *driver.BatchError
	if !errors.As(err, &blamed) || !errors.Is(err, cause) {
		t.Fatalf("got %v, want a BatchError with the cause", err)
	}
	if want := []string{"one", "two"}; !slices.Equal(blamed.Rows, want) {
		t.Errorf("blamed %v, want %v", blamed.Rows, want)
	}
	expect(t, b, "one", held, 0)
	expect(t, b, "two", held, 0)
}

func testPanic(t *testing.T, b Backend) {
	s := b.Store(t, func(context.Context, pgx.Tx, []expiry.Row) error { panic("boom") })
	b.Put(t, "one", held, -time.Minute)
	_, err := s.SweepBatch(t.Context(), driver.Request{Limit: 10})
	if _, ok := errors.AsType[*driver.BatchError](err); !ok {
		t.Fatalf("got %v, want a BatchError", err)
	}
	expect(t, b, "one", held, 0)
}

func testLook(t *testing.T, b Backend) {
	s := b.Store(t, nil)
	next := func(skip ...string) (time.Duration, bool) {
		t.Helper()
		o, err := s.Look(t.Context(), skip)
		if err != nil {
			t.Fatal(err)
		}
		return o.Due, o.Pending
	}
	if due, ok := next(); ok {
		t.Errorf("nothing is there, yet something is due in %v", due)
	}
	b.Put(t, "sold", confirmed, time.Minute)
	b.Put(t, "later", held, 2*time.Hour)
	b.Put(t, "soon", held, time.Hour)
	if due, ok := next(); !ok || due > time.Hour || due < 59*time.Minute {
		t.Errorf("due in %v (%v), want an hour", due, ok)
	}
	if due, ok := next("soon"); !ok || due > 2*time.Hour || due < 119*time.Minute {
		t.Errorf("without the first, due in %v (%v), want two hours", due, ok)
	}
	b.Put(t, "late", held, -time.Minute)
	if due, ok := next(); !ok || due > 0 {
		t.Errorf("due in %v (%v), want now", due, ok)
	}
}

func testBadLimit(t *testing.T, b Backend) {
	s := b.Store(t, nil)
	b.Put(t, "one", held, -time.Minute)
	for _, limit := range []int{0, -1} {
		if _, err := s.SweepBatch(t.Context(), driver.Request{Limit: limit}); err == nil {
			t.Errorf("limit %d was accepted", limit)
		}
	}
	expect(t, b, "one", held, 0)
}
