package connections_test

import (
	"context"
	"crypto/rand"
	"maps"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

var report = regexp.MustCompile("(?s)```sql\n([^`]*FROM pg_stat_activity[^`]*)```")

// The report of the guide to production tells the connections of a process apart by their state.
func TestReportByRoleAndState(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../../examples/guides/production.md")
	must(t, err)
	query := report.FindSubmatch(text)
	if query == nil {
		t.Fatal("the guide has no report")
	}
	cfg, err := pgxpool.ParseConfig(pgtest.URL(t))
	must(t, err)
	name := strings.ToLower(rand.Text()[:8])
	cfg.ConnConfig.RuntimeParams["application_name"] = name
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	tx, err := pool.Begin(t.Context())
	must(t, err)
	defer func() { must(t, tx.Rollback(context.WithoutCancel(t.Context()))) }()
	must(t, pool.Ping(t.Context())) // on a second connection, which is idle then
	rows, err := pgtest.New(t).Query(t.Context(), string(query[1]))
	must(t, err)
	got := map[string]int{}
	var application, state string
	var connections int
	_, err = pgx.ForEachRow(rows, []any{nil, &application, &state, &connections, nil, nil, nil}, func() error {
		if application == name {
			got[state] += connections
		}
		return nil
	})
	must(t, err)
	if want := map[string]int{"idle": 1, "idle in transaction": 1}; !maps.Equal(got, want) {
		t.Errorf("the report has %v, want %v", got, want)
	}
}
