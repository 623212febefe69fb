package migrate_test

import (
	"errors"
	"io/fs"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/synctest"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

var files = fstest.MapFS{
	"0001_create.sql": {Data: []byte(`CREATE TABLE {{table}} (n int); CREATE INDEX {{raw.table}}_n ON {{table}} (n);`)},
	"0002_fill.sql":   {Data: []byte(`INSERT INTO {{table}} VALUES (1);`)},

	"0001_create.down.sql": {Data: []byte(`DROP TABLE {{table}};`)},
	"0002_fill.down.sql":   {Data: []byte(`DELETE FROM {{table}};`)},
}

func set(table string, files fs.FS) migrate.Set {
	return migrate.Set{Component: "demo", Files: files, Names: map[string]string{"table": table}}
}

func apply(t *testing.T, pool *pgxpool.Pool, s migrate.Set) {
	t.Helper()
	if err := migrate.Apply(t.Context(), pool, s); err != nil {
		t.Fatal(err)
	}
}

func wantRows(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	var n int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM demo`).Scan(&n); err != nil || n != want {
		t.Fatalf("%d rows, %v; want %d", n, err, want)
	}
}

// Several processes apply the files once, even if the database's default isolation is serializable.
func TestApply_byManyProcesses(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t)+"&default_transaction_isolation=serializable", 8)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := migrate.Apply(t.Context(), pool, set("demo", files)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	wantRows(t, pool, 1)
	apply(t, pool, set("demo_two", files)) // a second table of the same component
}

func TestApply_onlyNewFiles(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	first := fstest.MapFS{"0001_create.sql": files["0001_create.sql"]}
	for _, step := range []fs.FS{first, files, files} {
		apply(t, pool, set("demo", step))
	}
	wantRows(t, pool, 1)
}

func TestApply_failureLeavesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	bad := fstest.MapFS{"0001_create.sql": files["0001_create.sql"], "0002_bad.sql": {Data: []byte(`SELECT nothing FROM nowhere`)}}
	if err := migrate.Apply(t.Context(), pool, set("demo", bad)); err == nil || !strings.Contains(err.Error(), "0002_bad.sql") {
		t.Fatalf("error = %v, want one that names the file", err)
	}
	var there bool
	if err := pool.QueryRow(t.Context(), `SELECT to_regclass('demo') IS NOT NULL`).Scan(&there); err != nil || there {
		t.Fatalf("table is there: %v, %v", there, err)
	}
}

func TestExport(t *testing.T) {
	t.Parallel()
	s := set("orders", files)
	s.Schema = "app"
	out, err := migrate.Export(s)
	if err != nil {
		t.Fatal(err)
	}
	if err := fstest.TestFS(out, "0001_create.down.sql", "0001_create.sql", "0002_fill.down.sql", "0002_fill.sql"); err != nil {
		t.Error(err)
	}
	text, err := fs.ReadFile(out, "0001_create.sql")
	want := `CREATE TABLE "app"."orders" (n int); CREATE INDEX orders_n ON "app"."orders" (n);`
	if err != nil || !strings.HasPrefix(string(text), want) || !strings.Contains(string(text), `INSERT INTO "app"."holdfast_migrations"`) {
		t.Errorf("exported %s, %v; want %s", text, err, want)
	}
}

// Apply skips files that another tool applied from the export, and applies files that the tool has undone.
func TestExport_filesRecordThemselves(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	demo := set("demo", files)
	out, err := migrate.Export(demo)
	if err != nil {
		t.Fatal(err)
	}
	run := func(names ...string) {
		t.Helper()
		for _, name := range names {
			text, err := fs.ReadFile(out, name)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := pool.Exec(t.Context(), string(text)); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	for _, names := range [][]string{
		{"0001_create.sql", "0002_fill.sql"},
		{"0002_fill.down.sql"},
		{"0002_fill.down.sql", "0001_create.down.sql", "0001_create.sql"},
	} {
		run(names...)
		apply(t, pool, demo)
		wantRows(t, pool, 1)
	}
}

func TestRefused(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]migrate.Set{
		"no files":            set("demo", fstest.MapFS{}),
		"bad file name":       set("demo", fstest.MapFS{"create.sql": {}}),
		"unknown placeholder": set("demo", fstest.MapFS{"0001_a.sql": {Data: []byte("{{other}}")}}),
		"bad table":           set(`x"y`, files),
		"long table":          set(strings.Repeat("a", 49), files),
	} {
		if _, err := migrate.Export(s); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// A migration on a silent connection does not block other migrations: its transaction bounds how long the server
// holds the lock.
func TestApply_boundsItsLock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, sent := silent.NewPostgres(t, ""), ""
		s.Answer = func(sql string) (string, *pgproto3.ErrorResponse) {
			sent += sql + "\n"
			return "", nil
		}
		_ = migrate.Apply(t.Context(), s.Pool(t, 1), set("demo", files)) // the script has no tables
		if bound, lock := strings.Index(sent, "idle_in_transaction_session_timeout', '5s'"), strings.Index(sent, "pg_advisory_xact_lock"); bound < 0 || lock < bound {
			t.Errorf("it sends\n%s", sent)
		}
	})
}

func TestMissing(t *testing.T) {
	t.Parallel()
	ours := migrate.Missing{Call: "Migrate", Tables: []string{`"shop"."holdfast_outbox"`, `"shop"."holdfast_outbox_lanes"`}}
	for _, tc := range []struct {
		code, message string
		want          bool
	}{
		{"42P01", `relation "holdfast_outbox" does not exist`, true},
		{"42P01", `relation "shop.holdfast_outbox_lanes" does not exist`, true},
		{"42P01", `relation "shop.orders" does not exist`, false},
		{"3F000", `schema "shop" does not exist`, true},
		{"3F000", `schema "other" does not exist`, false},
		{"42703", `column "holdfast_outbox" does not exist`, false},
	} {
		err := ours.Explain(&pgconn.PgError{Code: tc.code, Message: tc.message})
		if got := strings.HasPrefix(err.Error(), "call Migrate first"); got != tc.want {
			t.Errorf("%s %s: %v", tc.code, tc.message, err)
		}
	}
	if err := ours.Explain(nil); err != nil {
		t.Error(err)
	}
	if other := errors.New("other"); ours.Explain(other) != other {
		t.Error("another error was changed")
	}
}
