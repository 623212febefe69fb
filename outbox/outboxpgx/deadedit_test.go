package outboxpgx_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/jackc/pgx/v5"
)

// An edited letter keeps all but its body; one that cannot be edited stays, and others are as far apart as
// they are to be, however many are in memory at a time.
func TestReplayEdited(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	const n = 45
	_, err := f.pool.Exec(t.Context(), `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, ordering_key, transport_name, exchange, routing_key, created_at, attempts,
			error_class, last_error)
		SELECT gen_random_uuid(), n, 0, 'order', convert_to(n::text, 'UTF8'), '', 'k', '', '', '', now(), 3, 'permanent', 'no' FROM generate_series(1, $1) n`, n)
	must(t, err)
	edit := func(m outbox.Message) ([]byte, error) {
		if string(m.Body) == "7" {
			return nil, errOnPurpose
		}
		return append([]byte("edited "), m.Body...), nil
	}
	for _, r := range []outbox.Replay{{DryRun: true, Edit: edit}, {By: "ada", Edit: edit, PerSecond: 1.0 / 60}} {
		got, err := f.dead.Replay(t.Context(), outbox.Filter{}, r)
		if want := (outbox.Replayed{Returned: n - 1, Failed: 1}); got != want || !errors.Is(err, errOnPurpose) {
			t.Errorf("%+v, %v, want %+v", got, err, want)
		}
	}
	rows, _ := f.pool.Query(t.Context(), `
		SELECT convert_from(body, 'UTF8') || ' ' || name || ' ' || ordering_key || ' ' || round(extract(epoch FROM due_at - min(due_at) OVER ()) / 60)
		FROM holdfast_outbox ORDER BY seq`)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string]) // the error of Query too
	must(t, err)
	if len(got) != n-1 || got[0] != "edited 1 order k 0" || got[n-2] != fmt.Sprintf("edited %d order k %d", n, n-2) {
		t.Errorf("%d messages: %v", len(got), got)
	}
	entries, err := f.store.Audit(t.Context(), 0)
	if err != nil || len(entries) != 1 || entries[0].Action != "edit" || entries[0].Count != n-1 || entries[0].Filter.IDs != nil {
		t.Errorf("audit %+v, %v", entries, err)
	}
	left, err := f.dead.List(t.Context(), outbox.Filter{})
	if err != nil || len(left) != 1 || string(left[0].Body) != "7" {
		t.Errorf("left %+v, %v", left, err)
	}
}
