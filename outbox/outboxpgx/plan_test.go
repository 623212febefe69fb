package outboxpgx_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

func TestQueriesUseTheirIndexes(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{Retention: time.Hour})
	// The worst case for statistics: analysed while empty, then filled; published rows are the
	// most.
	_, err := f.pool.Exec(t.Context(), `ANALYZE holdfast_outbox`)
	must(t, err)
	_, err = f.pool.Exec(t.Context(), `
		INSERT INTO holdfast_outbox (id, lane, name, body, content_type, ordering_key, published_at, due_at)
		SELECT gen_random_uuid(), n % 16, 'a', '1', 'application/json', 'k' || n % 1000,
		       CASE WHEN n % 10 < 8 THEN now() END, CASE WHEN n % 10 = 9 THEN now() + interval '1 hour' END
		FROM generate_series(1, 50000) n`)
	must(t, err)
	ids, lanes, tokens, text := []string{"0195e7f0-0000-7000-8000-000000000000"}, []int16{1}, []int64{1}, []string{"x"}
	for name, args := range map[string][]any{
		"lease":     {int64(7), 1000000, 4, []string{}, 500, true},
		"lower":     {},
		"read":      {int64(7), 500, []string{}, 32 << 20},
		"due":       {},
		"overdue":   {500},
		"hold due":  {lanes, 500},
		"hold":      {int64(7), 1000, []string{}},
		"release":   {lanes, 500, 5000, 500, 10, int64(100_000)},
		"published": {lanes, tokens, ids},
		"kept":      {lanes, tokens, ids},
		"failed":    {lanes, tokens, ids, []int64{1}, text, text},
		"dead":      {lanes, tokens, ids, text, text},
		"close":     {lanes, tokens, int64(1), int64(0)},
		"prune":     {int64(1), 1000},
		"stats":     {1000},
	} {
		plan := f.explain(t, outboxpgx.Statement(name), args)
		if strings.Contains(plan, "Seq Scan on holdfast_outbox ") || strings.Contains(plan, "Seq Scan on holdfast_outbox o") {
			t.Errorf("%s reads the whole table:\n%s", name, plan)
		}
	}
}

// explain returns the plan of a statement under the settings of a relay's transaction.
func (f *fixture) explain(t *testing.T, sql string, args []any) string {
	t.Helper()
	tx, err := f.pool.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), outboxpgx.Statement("setup"))
	must(t, err)
	rows, _ := tx.Query(t.Context(), "EXPLAIN "+sql, args...)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	return strings.Join(lines, "\n")
}
