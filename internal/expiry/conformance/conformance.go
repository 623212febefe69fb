// Package conformance is the test suite that every driver.Store passes, the fake and the adapters.
package conformance

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/txretry"
)

// Emit is the callback of a store. It is called in the transaction of the batch with the expired rows.
type Emit func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error

// Backend is one empty set of rows, for one test.
type Backend interface {
	// Store returns a store on the rows that calls emit.
	Store(t *testing.T, emit Emit) driver.Store
	// Put writes a new or existing row, whose deadline is after the given time by the store's clock.
	Put(t *testing.T, id, state string, in time.Duration)
	// State returns the state of a row.
	State(t *testing.T, id string) string
	// Announce records in the transaction that the row expired, like an outbox.
	Announce(ctx context.Context, tx pgx.Tx, row expiry.Row) error
	// Announced returns the number of committed announcements of a row.
	Announced(t *testing.T, id string) int
	// Fail runs a statement that fails with an SQLSTATE, and returns its error.
	Fail(ctx context.Context, tx pgx.Tx, sqlState string) error
}

const (
	held      = "held"
	expired   = "expired"
	confirmed = "confirmed"
)

// Test runs the suite. open returns a fresh backend. run runs the body of a subtest, in a synctest bubble or
// directly.
func Test(t *testing.T, open func(t *testing.T) Backend, run func(t *testing.T, body func(t *testing.T))) {
	for name, test := range map[string]func(t *testing.T, b Backend){
		"OnlyDueRowsExpire":          testOnlyDue,
		"LimitAndOrder":              testLimitAndOrder,
		"SkippedRowsAreLeftAlone":    testSkip,
		"OnlyTheseRows":              testOnly,
		"AfterACursor":               testAfter,
		"RepeatedBatchHasTheSameIDs": testRepeated,
		"NamedRowIsBlamed":           testNamed,
		"FailedBatchChangesNothing":  testFailedBatch,
		"PanicIsAnError":             testPanic,
		"FailedStatements":           testFailedStatements,
		"RowFailsLikeAnOutage":       testNotToBlame,
		"LookAhead":                  testLook,
		"BadLimitIsRejected":         testBadLimit,
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
		t.Errorf("second batch: %+v, want nothing", again)
	}
	expect(t, b, "due", expired, 1)
}

func testLimitAndOrder(t *testing.T, b Backend) {
	var order []string
	s := b.Store(t, func(_ context.Context, _ pgx.Tx, rows []expiry.Row) error {
		for _, row := range rows {
			if row.Deadline.IsZero() {
				t.Errorf("row %s has no deadline", row.ID)
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
		t.Errorf("without rows, the next due time is in %v", due)
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

func testOnly(t *testing.T, b Backend) {
	s := b.Store(t, announce(b))
	b.Put(t, "a", held, -3*time.Minute)
	b.Put(t, "b", held, -2*time.Minute)
	b.Put(t, "c", held, -time.Minute)
	b.Put(t, "sold", confirmed, -time.Minute)
	b.Put(t, "early", held, time.Hour)
	for _, skip := range [][]string{{"b"}, {"a", "b"}} {
		only := []string{"b"}
		if batch := sweepBatch(t, s, driver.Request{Limit: 5, Only: only, Skip: skip}); batch != (driver.Batch{}) {
			t.Errorf("only %v without %v: got %+v, want nothing", only, skip, batch)
		}
	}
	behind := driver.Cursor{Deadline: time.Now().Add(time.Hour), ID: "z"}
	batch := sweepBatch(t, s, driver.Request{Limit: 5, Only: []string{"c", "a", "sold", "early", "unknown"}, After: behind})
	if batch.Expired != 2 || batch.Last.ID != "c" {
		t.Errorf("got %+v, want two rows", batch)
	}
	expect(t, b, "a", expired, 1)
	expect(t, b, "b", held, 0)
	expect(t, b, "c", expired, 1)
	expect(t, b, "sold", confirmed, 0)
	expect(t, b, "early", held, 0)
}

// Each batch continues behind the previous one, also among rows with the same deadline.
func testAfter(t *testing.T, b Backend) {
	var order []string
	s := b.Store(t, func(_ context.Context, _ pgx.Tx, rows []expiry.Row) error {
		for _, row := range rows {
			order = append(order, row.ID)
		}
		return errors.New("no")
	})
	for n := range 6 {
		b.Put(t, id(n), held, -time.Hour+time.Duration(n/2)*time.Minute)
	}
	var after driver.Cursor
	for range 3 {
		_, err := s.SweepBatch(t.Context(), driver.Request{Limit: 2, After: after, Skip: []string{id(3)}})
		failed, ok := errors.AsType[*driver.BatchError](err)
		if !ok {
			t.Fatalf("got %v, want a BatchError", err)
		}
		after = failed.Last
	}
	if want := []string{id(0), id(1), id(2), id(4), id(5)}; !slices.Equal(order, want) {
		t.Errorf("claimed %v, want %v", order, want)
	}
	if batch := sweepBatch(t, s, driver.Request{Limit: 2, After: after}); batch.Claimed != 0 {
		t.Errorf("got %+v behind the last row", batch)
	}
}

// A failed and repeated batch announces the same expiries with the same ids.
func testRepeated(t *testing.T, b Backend) {
	var seen [][]uuid.UUID
	s := b.Store(t, func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		var ids []uuid.UUID
		for _, row := range rows {
			ids = append(ids, expiry.EventID("hold.expired", row.ID, row.Deadline))
		}
		if seen = append(seen, ids); len(seen) == 1 {
			return errors.New("once")
		}
		return announce(b)(ctx, tx, rows)
	})
	b.Put(t, "one", held, -2*time.Minute)
	b.Put(t, "two", held, -time.Minute)
	if _, err := s.SweepBatch(t.Context(), driver.Request{Limit: 10}); err == nil {
		t.Fatal("the failure was lost")
	}
	sweepBatch(t, s, driver.Request{Limit: 10})
	if len(seen) != 2 || len(seen[0]) != 2 || !slices.Equal(seen[0], seen[1]) {
		t.Errorf("the ids were %v", seen)
	}
	expect(t, b, "one", expired, 1)
	expect(t, b, "two", expired, 1)
}

func testNamed(t *testing.T, b Backend) {
	name := "two"
	s := b.Store(t, func(context.Context, pgx.Tx, []expiry.Row) error {
		return &expiry.RowError{ID: name, Err: errors.New("bad")}
	})
	for n, id := range []string{"one", "two", "three"} {
		b.Put(t, id, held, -time.Hour+time.Duration(n)*time.Minute)
	}
	for _, tc := range []struct {
		name string
		want []string
	}{{"two", []string{"two"}}, {"a row of another batch", []string{"one", "two", "three"}}} {
		name = tc.name
		_, err := s.SweepBatch(t.Context(), driver.Request{Limit: 10})
		if blamed, ok := errors.AsType[*driver.BatchError](err); !ok || !slices.Equal(blamed.Rows, tc.want) {
			t.Errorf("got %v, want %v blamed", err, tc.want)
		}
	}
}

// A failing statement in a callback makes a BatchError, whatever the callback does with the error. A failure that any
// row would have is doubtful.
func testFailedStatements(t *testing.T, b Backend) {
	var emit Emit
	s := b.Store(t, func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error { return emit(ctx, tx, rows) })
	all := []string{"one", "two", "three"}
	for n, id := range all {
		b.Put(t, id, held, -time.Hour+time.Duration(n)*time.Minute)
	}
	for sqlState, doubtful := range map[string]bool{
		"22012": false, "23505": false, "23503": false, "54000": false, "57014": false, "P0001": false, "UE001": false, "25P02": false,
		"0A000": true, "25006": true, "40001": true, "40P01": true, "42P01": true, "42703": true, "42501": true,
		"53100": true, "53200": true, "55P03": true, "57P01": true, "08006": true, "58030": true, "XX000": true,
	} {
		fails := func(ctx context.Context, tx pgx.Tx) error { return b.Fail(ctx, tx, sqlState) }
		for name, tc := range map[string]struct {
			emit Emit
			want []string
		}{
			"returned":  {func(ctx context.Context, tx pgx.Tx, _ []expiry.Row) error { return fails(ctx, tx) }, all},
			"swallowed": {func(ctx context.Context, tx pgx.Tx, _ []expiry.Row) error { _ = fails(ctx, tx); return nil }, all},
			"of a row": {func(ctx context.Context, tx pgx.Tx, _ []expiry.Row) error {
				return &expiry.RowError{ID: "two", Err: fails(ctx, tx)}
			}, []string{"two"}},
		} {
			if doubtful || sqlState == "25P02" { // a callback cannot know which row is at fault
				tc.want = all
			}
			emit = tc.emit
			_, err := s.SweepBatch(t.Context(), driver.Request{Limit: 10})
			failed, ok := errors.AsType[*driver.BatchError](err)
			if !ok || failed.Doubtful != doubtful || !slices.Equal(failed.Rows, tc.want) || failed.Last.ID != "three" {
				t.Errorf("%s, %s: %#v, %v, want doubtful %v of %v", sqlState, name, failed, err, doubtful, tc.want)
			}
		}
	}
	for _, id := range all {
		expect(t, b, id, held, 0)
	}
}

// A row that keeps failing by something that is no row's fault stops no other row, and is not quarantined.
func testNotToBlame(t *testing.T, b Backend) {
	const rows = 5
	for n := range rows {
		b.Put(t, id(n), held, -time.Minute)
	}
	s := b.Store(t, func(ctx context.Context, tx pgx.Tx, batch []expiry.Row) error {
		for _, row := range batch {
			if row.ID == id(2) {
				return b.Fail(ctx, tx, "42P01")
			}
		}
		return announce(b)(ctx, tx, batch)
	})
	sw := sweeper(t, s, expiry.SweeperConfig{})
	total := 0
	for end := time.Now().Add(time.Minute); total < rows-1 && time.Now().Before(end); { // each sweep continues the search
		report, err := sw.Sweep(t.Context()) // the sweep may return the failure
		total += report.Expired
		if report.Poisoned > 0 {
			t.Fatalf("a row is in quarantine: %v", err)
		}
		if err := runloop.Sleep(t.Context(), 100*time.Millisecond); err != nil {
			t.Fatal(err)
		}
	}
	for n := range rows {
		if n == 2 {
			expect(t, b, id(n), held, 0)
		} else {
			expect(t, b, id(n), expired, 1)
		}
	}
}

func sweeper(t *testing.T, s driver.Store, cfg expiry.SweeperConfig) *expiry.Sweeper {
	t.Helper()
	cfg.Logger, cfg.BatchTimeout = slog.New(slog.DiscardHandler), time.Minute
	sw, err := expiry.NewSweeper(s, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return sw
}

func testDrain(t *testing.T, b Backend) {
	const rows = 23
	for n := range rows {
		b.Put(t, id(n), held, -time.Minute)
	}
	report, err := sweeper(t, b.Store(t, announce(b)), expiry.SweeperConfig{BatchSize: 5}).Sweep(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if report.Expired != rows || report.Batches != 5 {
		t.Errorf("got %+v, want %d rows in 5 batches", report, rows)
	}
	for n := range rows {
		expect(t, b, id(n), expired, 1)
	}
}

func testPoison(t *testing.T, b Backend) {
	const rows = 40
	poison := []string{id(0), id(1), id(17), id(39)}
	emit := func(ctx context.Context, tx pgx.Tx, batch []expiry.Row) error {
		for _, row := range batch {
			if slices.Contains(poison, row.ID) {
				return errors.New("poison")
			}
		}
		return announce(b)(ctx, tx, batch)
	}
	for n := range rows {
		b.Put(t, id(n), held, -time.Hour+time.Duration(n)*time.Second)
	}
	sw := sweeper(t, b.Store(t, emit), expiry.SweeperConfig{BatchSize: 16})
	report, err := sw.Sweep(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if report.Expired != rows-len(poison) || report.Poisoned != len(poison) {
		t.Errorf("got %+v", report)
	}
	for n := range rows {
		if slices.Contains(poison, id(n)) {
			expect(t, b, id(n), held, 0)
		} else {
			expect(t, b, id(n), expired, 1)
		}
	}
	if again, err := sw.Sweep(t.Context()); err != nil || again.Poisoned != 0 || again.Expired != 0 {
		t.Errorf("the next sweep: %+v, %v; the poison rows are in quarantine", again, err)
	}
}

func testSideBySide(t *testing.T, b Backend) {
	const rows, sweepers = 60, 4
	for n := range rows {
		b.Put(t, id(n), held, -time.Minute)
	}
	s := b.Store(t, announce(b))
	type result struct {
		report expiry.Report
		err    error
	}
	results := make(chan result, sweepers)
	for range sweepers {
		sw := sweeper(t, s, expiry.SweeperConfig{BatchSize: 7})
		go func() {
			report, err := sw.Sweep(t.Context())
			results <- result{report, err}
		}()
	}
	total := 0
	for range sweepers {
		r := <-results
		if lost := new(txretry.LockTimeoutError); r.err != nil && !errors.As(r.err, &lost) {
			t.Error(r.err)
		}
		total += r.report.Expired
	}
	// With SERIALIZABLE transactions a sweep may lose all its attempts to the others. Its rows are still due.
	last, err := sweeper(t, s, expiry.SweeperConfig{}).Sweep(t.Context())
	if err != nil {
		t.Error(err)
	}
	total += last.Expired
	if total != rows {
		t.Errorf("%d rows were expired, want %d", total, rows)
	}
	for n := range rows {
		expect(t, b, id(n), expired, 1)
	}
}
