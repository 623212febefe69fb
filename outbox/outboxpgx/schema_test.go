package outboxpgx_test

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

func TestMigrateByManyAtOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() { errs[i] = fixtureOn(t, pool, outboxpgx.Config{}).store.Migrate(t.Context()) })
	}
	wg.Wait()
	must(t, errors.Join(errs...))
	wantFinding(t, fixtureOn(t, pool, outboxpgx.Config{}).store, "", "")
}

func TestExportedFilesAreEnough(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.NewSchema(t)
	store, err := outboxpgx.New(pool, outboxpgx.Config{Schema: schema, Table: "events"})
	must(t, err)
	files := store.Schema()
	names, err := fs.Glob(files, "*.sql")
	must(t, err)
	run := func(down bool) {
		t.Helper()
		for _, name := range names {
			if strings.HasSuffix(name, ".down.sql") != down {
				continue
			}
			text, err := fs.ReadFile(files, name)
			must(t, err)
			_, err = pool.Exec(t.Context(), string(text))
			must(t, err)
		}
	}
	run(false)
	wantFinding(t, store, "", "")
	must(t, store.Migrate(t.Context())) // finds all of it applied
	slices.Reverse(names)
	run(true)
	var left int
	must(t, pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM pg_class WHERE relnamespace = $1::regnamespace AND relname LIKE 'events%')
		+ (SELECT count(*) FROM pg_proc WHERE pronamespace = $1::regnamespace)`, schema).Scan(&left))
	if left > 0 {
		t.Errorf("%d tables, indexes and functions are left", left)
	}
	must(t, store.Migrate(t.Context()))
	wantFinding(t, store, "", "")
}

// Names that differ in case are different tables, with indexes of their own.
func TestCaseOfNames(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	for _, table := range []string{"Events", "events"} {
		setupOn(t, pool, outboxpgx.Config{Table: table})
	}
	for _, table := range []string{"Events", "events"} {
		f := setupOn(t, pool, outboxpgx.Config{Table: table})
		wantFinding(t, f.store, "", "")
		f.write(t, outbox.Message{Name: "a", Body: []byte("1")})
		drain(t, f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{}), 1)
	}
}

func TestCheckFindsWhatIsMissing(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ sql, want string }{
		"table":    {`DROP TABLE holdfast_outbox_dead`, `"holdfast_outbox_dead" does not exist`},
		"pauses":   {`DROP TABLE holdfast_outbox_pause`, `"holdfast_outbox_pause" does not exist`},
		"column":   {`ALTER TABLE holdfast_outbox DROP COLUMN last_error`, "last_error"},
		"index":    {`DROP INDEX holdfast_outbox_held`, "holdfast_outbox_held is missing"},
		"function": {`DROP FUNCTION holdfast_outbox_write`, "holdfast_outbox_write\" does not exist"},
		"lanes":    {`DELETE FROM holdfast_outbox_lanes WHERE lane = 3`, "15 of 16 lanes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			_, err := f.pool.Exec(t.Context(), tc.sql)
			must(t, err)
			wantFinding(t, f.store, tc.want, "")
		})
	}
}

// The number of lanes is written in the SQL file and in package outbox.
func TestLanesAgree(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	var n int
	must(t, f.pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox_lanes`).Scan(&n))
	if n != driver.Lanes {
		t.Errorf("%d lanes in the table, %d in the code", n, driver.Lanes)
	}
}

func TestBadConfigIsRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	for name, err := range map[string]error{
		"no pool":    second(outboxpgx.New(nil, outboxpgx.Config{})),
		"table":      second(outboxpgx.New(pool, outboxpgx.Config{Table: "a b"})),
		"long table": second(outboxpgx.New(pool, outboxpgx.Config{Table: strings.Repeat("x", 41)})),
		"schema":     second(outboxpgx.New(pool, outboxpgx.Config{Schema: `a";`})),
		"dedup":      second(outboxpgx.New(pool, outboxpgx.Config{DedupRetention: -1})),
		"body":       second(outboxpgx.New(pool, outboxpgx.Config{MaxBodyBytes: -1})),
		"retention":  second(outboxpgx.New(pool, outboxpgx.Config{Retention: -1})),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
