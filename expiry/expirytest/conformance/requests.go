package conformance

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
)

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

// Each batch goes on behind the last one, among rows of one deadline too.
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

// A batch that fails and is run again announces the same expiries under the same
// ids.
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
	}{{"two", []string{"two"}}, {"somebody else's", []string{"one", "two", "three"}}} {
		name = tc.name
		_, err := s.SweepBatch(t.Context(), driver.Request{Limit: 10})
		if blamed, ok := errors.AsType[*driver.BatchError](err); !ok || !slices.Equal(blamed.Rows, tc.want) {
			t.Errorf("got %v, want %v blamed", err, tc.want)
		}
	}
}
