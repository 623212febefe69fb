package outboxpgx_test

import (
	"errors"
	"io/fs"
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
		wg.Go(func() { errs[i] = outboxpgx.Migrate(t.Context(), pool, outboxpgx.SchemaConfig{}) })
	}
	wg.Wait()
	must(t, errors.Join(errs...))
	source, err := outboxpgx.NewSource(pool, outboxpgx.SourceConfig{})
	must(t, err)
	findings, err := source.Check(t.Context())
	must(t, err)
	if len(findings) > 0 {
		t.Errorf("findings after Migrate: %v", findings)
	}
}

func TestExportedFilesAreEnough(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.NewSchema(t)
	cfg := outboxpgx.SchemaConfig{Schema: schema, Table: "events"}
	files, err := outboxpgx.Migrations(cfg)
	must(t, err)
	names, err := fs.Glob(files, "*.sql")
	must(t, err)
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		must(t, err)
		_, err = pool.Exec(t.Context(), string(text))
		must(t, err)
	}
	source, err := outboxpgx.NewSource(pool, outboxpgx.SourceConfig{Schema: schema, Table: "events"})
	must(t, err)
	findings, err := source.Check(t.Context())
	must(t, err)
	if len(findings) > 0 {
		t.Errorf("findings: %v", findings)
	}
}

// Names that differ in case are different tables, with indexes of their own.
func TestCaseOfNames(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	for _, table := range []string{"Events", "events"} {
		must(t, outboxpgx.Migrate(t.Context(), pool, outboxpgx.SchemaConfig{Table: table}))
	}
	for _, table := range []string{"Events", "events"} {
		f := setupOn(t, pool, outboxpgx.SourceConfig{Table: table})
		findings, err := f.source.Check(t.Context())
		must(t, err)
		if len(findings) > 0 {
			t.Errorf("%s: %v", table, findings)
		}
		f.write(t, outbox.Message{Name: "a", Body: []byte("1")})
		drain(t, f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{}), 1)
	}
}

func TestCheckFindsWhatIsMissing(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ sql, want string }{
		"table":  {`DROP TABLE holdfast_outbox_dead`, `"holdfast_outbox_dead" lacks`},
		"column": {`ALTER TABLE holdfast_outbox DROP COLUMN last_error`, "last_error"},
		"index":  {`DROP INDEX holdfast_outbox_held`, "holdfast_outbox_held is missing"},
		"lanes":  {`DELETE FROM holdfast_outbox_lanes WHERE lane = 3`, "15 of 16 lanes"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.SourceConfig{})
			_, err := f.pool.Exec(t.Context(), tc.sql)
			must(t, err)
			findings, err := f.source.Check(t.Context())
			must(t, err)
			if len(findings) != 1 || !strings.Contains(findings[0].Problem, tc.want) {
				t.Errorf("findings: %v", findings)
			}
		})
	}
}

// The number of lanes is written in the SQL file and in package outbox.
func TestLanesAgree(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.SourceConfig{})
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
		"writer table": func() error { _, err := outboxpgx.NewWriter(outboxpgx.WriterConfig{Table: "a b"}); return err }(),
		"writer dedup": second(outboxpgx.NewWriter(outboxpgx.WriterConfig{DedupRetention: -1})),
		"writer body":  func() error { _, err := outboxpgx.NewWriter(outboxpgx.WriterConfig{MaxBodyBytes: -1}); return err }(),
		"no pool":      func() error { _, err := outboxpgx.NewSource(nil, outboxpgx.SourceConfig{}); return err }(),
		"lanes": func() error {
			_, err := outboxpgx.NewSource(pool, outboxpgx.SourceConfig{LanesPerClaim: 17})
			return err
		}(),
		"retention":  func() error { _, err := outboxpgx.NewSource(pool, outboxpgx.SourceConfig{Retention: -1}); return err }(),
		"long table": outboxpgx.Migrate(t.Context(), pool, outboxpgx.SchemaConfig{Table: strings.Repeat("x", 41)}),
		"schema":     outboxpgx.Migrate(t.Context(), pool, outboxpgx.SchemaConfig{Schema: `a";`}),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
