package conformance

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// A statement of a callback that fails makes a BatchError, whatever it is and
// whatever the callback makes of it. What any row would meet accuses none.
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
			if doubtful || sqlState == "25P02" { // a callback cannot know whose fault it is
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

// A row that goes on failing by what is no row's fault stops no other, and is not
// accused.
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
	for end := time.Now().Add(time.Minute); total < rows-1 && time.Now().Before(end); { // each goes on with the search
		report, err := sw.Sweep(t.Context()) // which may end with the failure
		total += report.Expired
		if report.Poisoned > 0 {
			t.Fatalf("a row is accused: %v", err)
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
