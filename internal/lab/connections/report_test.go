package connections_test

import (
	"crypto/rand"
	"maps"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

var report = regexp.MustCompile("(?s)```sql\n([^`]*FROM pg_stat_activity[^`]*)```")

// The report of the guide to production tells the connections of each role apart by their state, behind
// a pooler too.
func TestReportByRoleAndState(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "starts a PgBouncer, for one query of a guide")
	text, err := os.ReadFile("../../../examples/guides/production.md")
	must(t, err)
	query := report.FindSubmatch(text)
	if query == nil {
		t.Fatal("the guide has no report")
	}
	role := strings.ToLower(rand.Text()[:8])
	address := pgtest.URL(t)
	direct, err := pgxpool.ParseConfig(address)
	must(t, err)
	pooled := pgtest.Behind(t, address, pgx.QueryExecModeExec).Config()

	for name, cfg := range map[string]*pgxpool.Config{role + "-api": direct, role + "-relay": pooled} {
		cfg.ConnConfig.RuntimeParams["application_name"] = name
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		must(t, err)
		t.Cleanup(pool.Close)
		tx, err := pool.Begin(t.Context())
		must(t, err)
		defer tx.Rollback(t.Context())
		must(t, pool.Ping(t.Context())) // a second one, which is idle
	}

	rows, err := pgtest.New(t).Query(t.Context(), string(query[1]))
	must(t, err)
	type line = struct {
		Role, Application, State string
		Connections              int
	}
	lines, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (l line, err error) {
		return l, row.Scan(&l.Role, &l.Application, &l.State, &l.Connections, nil, nil, nil)
	})
	must(t, err)
	got := map[string]int{}
	for _, l := range lines {
		if strings.HasPrefix(l.Application, role) {
			got[strings.TrimPrefix(l.Application, role)+" "+l.State] += l.Connections
		}
	}
	want := map[string]int{"-api idle": 1, "-api idle in transaction": 1, "-relay idle": 1, "-relay idle in transaction": 1}
	if !maps.Equal(got, want) {
		t.Errorf("the report has %v, want %v", got, want)
	}
}
