// Package schematools contains tests only: goose, golang-migrate and atlas apply and undo the files that `schema print`
// writes.
package schematools

import (
	"bytes"
	"context"
	"database/sql"
	"log/slog"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"ariga.io/atlas/sql/migrate"
	"ariga.io/atlas/sql/postgres"
	gomigrate "github.com/golang-migrate/migrate/v4"
	gomigratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	_ "github.com/golang-migrate/migrate/v4/source/file"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// service is a database with tables of the components, and its operator.
type service struct {
	db       *pgxpool.Pool
	manager  *txretry.Manager
	outbox   *outboxpgx.Store
	operator operator.Config
	older    operator.Config // of the previous release, which had fewer files
	dir      string          // with the tool's files

	revisions revisions // recorded by atlas
}

// tool applies all files of a folder, and undoes them.
type tool struct{ up, down func(*testing.T, *service) }

// TestTools: each tool makes the tables. doctor finds them complete, setup adopts them, and they work. After undoing,
// nothing is left, and they can be made again.
func TestTools(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres)
	for format, tool := range map[string]tool{"goose": {gooseUp, gooseDown}, "golang-migrate": {migrateUp, migrateDown}, "atlas": {atlasUp, plainDown}} {
		t.Run(format, func(t *testing.T) {
			s := newService(t, database(t, server.URL(), format))
			s.run(t, 0, "schema", "print", "--format="+format, "--dir="+s.dir)
			s.run(t, 1, "doctor")
			for range 2 {
				tool.up(t, s)
				s.run(t, 0, "doctor")
				made := s.applied(t)
				s.run(t, 0, "setup")
				if after := s.applied(t); strings.Count(made, ";") != 9 || after != made {
					t.Errorf("setup has applied files again that the tool had applied: %s, before %s", after, made)
				}
				s.use(t)
				tool.down(t, s)
				s.wantNothing(t)
			}
		})
	}
}

// TestTools_upgrade: each tool applies the files that a release adds to the previous one, after a migration of the user's
// own in the same folder.
func TestTools_upgrade(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres)
	for format, tool := range map[string]tool{"goose": {gooseUp, nil}, "golang-migrate": {migrateUp, nil}, "atlas": {atlasUp, nil}} {
		t.Run(format, func(t *testing.T) {
			s := newService(t, database(t, server.URL(), format))
			newer := s.operator
			s.operator = s.older
			s.run(t, 0, "schema", "print", "--format="+format, "--dir="+s.dir)
			tool.up(t, s)
			s.run(t, 0, "doctor")
			name, text := "20260101120000_orders.sql", "CREATE TABLE orders (id int);\n"
			switch format {
			case "goose":
				text = "-- +goose Up\n" + text
			case "golang-migrate":
				name = "20260101120000_orders.up.sql"
			}
			must(t, os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o600))
			tool.up(t, s)
			s.operator = newer
			s.run(t, 1, "doctor")
			s.run(t, 0, "schema", "print", "--format="+format, "--dir="+s.dir)
			tool.up(t, s)
			s.run(t, 0, "doctor")
			s.use(t)
		})
	}
}

// database creates a database and returns its address.
func database(t *testing.T, server, name string) string {
	t.Helper()
	name = "of " + name
	_, err := pgtest.Pool(t, server, 1).Exec(t.Context(), "CREATE DATABASE "+pgx.Identifier{name}.Sanitize())
	must(t, err)
	address, err := url.Parse(server)
	must(t, err)
	address.Path = "/" + name
	return address.String()
}

func newService(t *testing.T, url string) *service {
	t.Helper()
	s := &service{db: pgtest.Pool(t, url, 4), dir: t.TempDir(), revisions: revisions{}}
	quiet := slog.New(slog.DiscardHandler)
	manager, err := txretry.New(s.db, txretry.Config{})
	must(t, err)
	store, err := outboxpgx.New(s.db, outboxpgx.Config{Logger: quiet})
	must(t, err)
	other, err := outboxpgx.New(s.db, outboxpgx.Config{Table: "audit_outbox", Logger: quiet})
	must(t, err)
	books, err := inboxpgx.New(manager, "billing", inboxpgx.Config{Logger: quiet})
	must(t, err)
	keys, err := idempotencypgx.New(manager, idempotencypgx.Config{Lease: time.Minute, Logger: quiet})
	must(t, err)
	log, err := operator.NewPostgresLog(s.db)
	must(t, err)
	s.manager, s.outbox = manager, store
	config := operator.Config{Outboxes: []operator.Outbox{{Store: store}}, Parts: []operator.Part{{Name: "inbox", Part: books}}, Log: log}
	s.older = config
	config.Outboxes = append(config.Outboxes, operator.Outbox{Name: "audit", Store: other})
	config.Parts = append(config.Parts, operator.Part{Name: "idempotency", Part: keys})
	s.operator = config
	return s
}

// run checks that a command exits with a code, and returns its output.
func (s *service) run(t *testing.T, code int, args ...string) string {
	t.Helper()
	var out, errs bytes.Buffer
	if got := command.Run(t.Context(), s.operator, args, &out, &errs); got != code {
		t.Fatalf("%v exits with %d: %s%s", args, got, out.String(), errs.String())
	}
	return out.String()
}

// applied describes the migrations that Migrate considers applied, and their times.
func (s *service) applied(t *testing.T) (all string) {
	t.Helper()
	must(t, s.db.QueryRow(t.Context(), `SELECT string_agg(component || version || ' ' || applied_at || ';', ' ' ORDER BY component, version) FROM holdfast_migrations`).Scan(&all))
	return all
}

// use stores a message with the functions and tables that the tool made.
func (s *service) use(t *testing.T) {
	t.Helper()
	must(t, s.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		_, _, err := s.outbox.WriteOnce(ctx, tx, "k", outbox.Message{Name: "order.placed", Key: "k", Body: []byte("1")})
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `SELECT holdfast_outbox_write('order.placed', '2')`)
		return err
	}))
	if depth, err := s.outbox.Depth(t.Context()); err != nil || depth.Ready != 2 {
		t.Errorf("%+v, %v, want 2 messages", depth, err)
	}
}

// wantNothing checks that nothing is left except the tables of versions, and that ours is empty.
func (s *service) wantNothing(t *testing.T) {
	t.Helper()
	rows, _ := s.db.Query(t.Context(), `
		SELECT relname::text FROM pg_class WHERE relnamespace = current_schema()::regnamespace
		UNION ALL SELECT proname::text FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
		UNION ALL SELECT typname::text FROM pg_type WHERE typnamespace = current_schema()::regnamespace
		UNION ALL SELECT component || version FROM holdfast_migrations`)
	left, err := pgx.CollectRows(rows, pgx.RowTo[string]) // also returns the error of Query
	must(t, err)
	for _, name := range left {
		if !strings.Contains(name, "holdfast_migrations") && !strings.Contains(name, "goose_") && !strings.Contains(name, "schema_migrations") {
			t.Errorf("left is %s", name)
		}
	}
}

func (s *service) sql(t *testing.T) *sql.DB {
	t.Helper()
	db := stdlib.OpenDBFromPool(s.db)
	t.Cleanup(func() { must(t, db.Close()) })
	return db
}

func (s *service) goose(t *testing.T) *goose.Provider {
	t.Helper()
	p, err := goose.NewProvider(goose.DialectPostgres, s.sql(t), os.DirFS(s.dir))
	must(t, err)
	return p
}

func gooseUp(t *testing.T, s *service) {
	_, err := s.goose(t).Up(t.Context())
	must(t, err)
}

func gooseDown(t *testing.T, s *service) {
	_, err := s.goose(t).DownTo(t.Context(), 0)
	must(t, err)
}

// migrating runs golang-migrate on its own connection, which it closes.
func (s *service) migrating(t *testing.T, do func(*gomigrate.Migrate) error) {
	t.Helper()
	driver, err := gomigratepgx.WithInstance(stdlib.OpenDB(*s.db.Config().ConnConfig), &gomigratepgx.Config{})
	must(t, err)
	m, err := gomigrate.NewWithDatabaseInstance("file://"+s.dir, "pgx5", driver)
	must(t, err)
	must(t, do(m))
	source, closed := m.Close()
	must(t, source)
	must(t, closed)
}

func migrateUp(t *testing.T, s *service) { s.migrating(t, (*gomigrate.Migrate).Up) }

func migrateDown(t *testing.T, s *service) { s.migrating(t, (*gomigrate.Migrate).Down) }

// atlasUp hashes the folder, like `atlas migrate hash`, and applies it statement by statement. It uses its own connection,
// because atlas empties the search path for a while, and may restore it on a different connection.
func atlasUp(t *testing.T, s *service) {
	dir, err := migrate.NewLocalDir(s.dir)
	must(t, err)
	sum, err := dir.Checksum()
	must(t, err)
	must(t, migrate.WriteSumFile(dir, sum))
	must(t, migrate.Validate(dir))
	db := stdlib.OpenDB(*s.db.Config().ConnConfig)
	db.SetMaxOpenConns(1)
	defer func() { must(t, db.Close()) }()
	driver, err := postgres.Open(db)
	must(t, err)
	executor, err := migrate.NewExecutor(driver, dir, s.revisions, migrate.WithAllowDirty(true)) // holdfast_migrations exists the second time
	must(t, err)
	must(t, executor.ExecuteN(t.Context(), 0))
}

// revisions are the revisions that atlas records.
type revisions map[string]*migrate.Revision

func (r revisions) Ident() *migrate.TableIdent { return &migrate.TableIdent{Name: "atlas_revisions"} }

func (r revisions) ReadRevisions(context.Context) ([]*migrate.Revision, error) {
	byVersion := func(a, b *migrate.Revision) int { return strings.Compare(a.Version, b.Version) }
	return slices.SortedFunc(maps.Values(r), byVersion), nil
}

func (r revisions) ReadRevision(_ context.Context, version string) (*migrate.Revision, error) {
	if one, ok := r[version]; ok {
		return one, nil
	}
	return nil, migrate.ErrRevisionNotExist
}

func (r revisions) WriteRevision(_ context.Context, one *migrate.Revision) error {
	r[one.Version] = one
	return nil
}

func (r revisions) DeleteRevision(_ context.Context, version string) error {
	delete(r, version)
	return nil
}

// plainDown runs the output of `schema print --down`, because the files for atlas have no down migrations.
func plainDown(t *testing.T, s *service) {
	_, err := s.db.Exec(t.Context(), s.run(t, 0, "schema", "print", "--down"))
	must(t, err)
	clear(s.revisions)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
