package migrate_test

import (
	"context"
	"io/fs"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
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

func TestApplyBySeveralAtOnce(t *testing.T) {
	t.Parallel()
	for _, isolation := range []string{"read committed", "serializable"} {
		t.Run("default "+isolation, func(t *testing.T) {
			t.Parallel()
			applyBySeveral(t, isolation)
		})
	}
}

func applyBySeveral(t *testing.T, defaultIsolation string) {
	t.Helper()
	pool := pgtest.Pool(t, pgtest.URL(t)+"&default_transaction_isolation="+url.PathEscape(defaultIsolation), 8)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := migrate.Apply(t.Context(), pool, set("demo", files)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	var rows int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM demo`).Scan(&rows); err != nil || rows != 1 {
		t.Fatalf("rows = %d, %v; the second file must run once", rows, err)
	}
	if err := migrate.Apply(t.Context(), pool, set("demo_two", files)); err != nil {
		t.Fatalf("a second table of the same component: %v", err)
	}
}

func TestApplyOnlyWhatIsNew(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	first := fstest.MapFS{"0001_create.sql": files["0001_create.sql"]}
	for _, step := range []fs.FS{first, files, files} {
		if err := migrate.Apply(t.Context(), pool, set("demo", step)); err != nil {
			t.Fatal(err)
		}
	}
	var rows int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM demo`).Scan(&rows); err != nil || rows != 1 {
		t.Fatalf("rows = %d, %v", rows, err)
	}
}

func TestFailingFileLeavesNothing(t *testing.T) {
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
	text, err := fs.ReadFile(out, "0001_create.sql")
	want := `CREATE TABLE "app"."orders" (n int); CREATE INDEX orders_n ON "app"."orders" (n);`
	if err != nil || !strings.HasPrefix(string(text), want) || !strings.Contains(string(text), `INSERT INTO "app"."holdfast_migrations"`) {
		t.Errorf("exported %s, %v; want %s", text, err, want)
	}
}

// What another tool has applied of the exported files, Apply does not apply again; what it has undone,
// Apply does.
func TestExportedFilesAreNoted(t *testing.T) {
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
	wants := func(want int) {
		t.Helper()
		if err := migrate.Apply(t.Context(), pool, demo); err != nil {
			t.Fatal(err)
		}
		var n int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM demo`).Scan(&n); err != nil || n != want {
			t.Errorf("%d rows, %v; want %d", n, err, want)
		}
	}
	run("0001_create.sql", "0002_fill.sql")
	wants(1)
	run("0002_fill.down.sql")
	wants(1)
	run("0002_fill.down.sql", "0001_create.down.sql", "0001_create.sql")
	wants(1)
}

func TestExportIsAFileSystem(t *testing.T) {
	t.Parallel()
	out, err := migrate.Export(set("orders", files))
	if err != nil {
		t.Fatal(err)
	}
	if err := fstest.TestFS(out, "0001_create.down.sql", "0001_create.sql", "0002_fill.down.sql", "0002_fill.sql"); err != nil {
		t.Error(err)
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

// A process whose connection falls silent in the middle keeps no other from migrating.
func TestApplyThatFallsSilent(t *testing.T) {
	t.Parallel()
	pgtest.SilentMigration(t, "INSERT INTO", func(ctx context.Context, pool *pgxpool.Pool) error {
		return migrate.Apply(ctx, pool, set("demo", files))
	})
}
