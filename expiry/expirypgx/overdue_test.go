package expirypgx_test

import (
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/expiry/expirypgx"
)

func TestOverdue(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.exec(t, `INSERT INTO holds (id, expires_at, status, seat) VALUES
		('a', now() - interval '2 hours', 'held', 'A1'), ('b', now() - interval '3 hours', 'held', NULL), ('c', now() - interval '1 second', 'held', 'C'),
		('d', now() + interval '1 hour', 'held', 'D'), ('e', now() - interval '9 hours', 'expired', 'E'), ('f', '-infinity', 'held', 'F')`)
	store := b.store(t, expirypgx.Config{Columns: []string{"seat"}})
	for _, tc := range []struct {
		by    time.Duration
		limit int
		want  []string
	}{{0, 10, []string{"f", "b", "a", "c"}}, {time.Minute, 10, []string{"f", "b", "a"}}, {150 * time.Minute, 10, []string{"f", "b"}}, {0, 2, []string{"f", "b"}}} {
		rows, err := store.Overdue(t.Context(), tc.by, tc.limit)
		must(t, err)
		var got []string
		for _, r := range rows {
			got = append(got, r.ID)
			if r.ID == "a" && (r.Values["seat"] != "A1" || time.Since(r.Deadline) < time.Hour) {
				t.Errorf("%+v", r)
			}
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("by %v, at most %d: %v, want %v", tc.by, tc.limit, got, tc.want)
		}
	}
	for _, bad := range []struct {
		by    time.Duration
		limit int
	}{{-1, 1}, {0, 0}} {
		if _, err := store.Overdue(t.Context(), bad.by, bad.limit); err == nil {
			t.Errorf("%+v: no error", bad)
		}
	}
}
