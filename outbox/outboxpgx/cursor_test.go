package outboxpgx_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// A list goes on behind letters that died at no time, of another program, and between those that died at the same time.
func TestPagesOfOddTimes(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	_, err := f.pool.Exec(t.Context(), `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error, died_at)
		SELECT gen_random_uuid(), n, 0, 'n' || n, '', '', '', '', '', now(), 1, '', '', (ARRAY['-infinity', '1969-07-20', '2026-01-01', 'infinity'])[1 + n / 3]::timestamptz
		FROM generate_series(0, 11) n`)
	must(t, err)
	all, err := f.dead.List(t.Context(), outbox.Filter{})
	must(t, err)
	after := ""
	for i, want := range all {
		page, err := f.dead.List(t.Context(), outbox.Filter{Limit: 1, After: after})
		if err != nil || len(page) != 1 || page[0].ID != want.ID {
			t.Fatalf("page %d behind %q: %+v, %v, want %s", i, after, page, err, want.Name)
		}
		after = page[0].Cursor
	}
	if page, err := f.dead.List(t.Context(), outbox.Filter{After: after}); len(page) != 0 || err != nil {
		t.Errorf("behind the last: %+v, %v", page, err)
	}
	for _, wrong := range []string{".", "1", "1.", ".1", "x.1", "1.x", "1.2.3", "infinity"} {
		if _, err := f.dead.List(t.Context(), outbox.Filter{After: wrong}); err == nil {
			t.Errorf("%q is a cursor", wrong)
		}
	}
}
