package outboxpgx_test

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
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
	must(t, store.Migrate(t.Context())) // finds everything applied
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

// Names that differ only in case are different tables, with separate indexes.
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

// A Store is named after its table, as configured.
func TestName(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	for want, cfg := range map[string]outboxpgx.Config{"holdfast_outbox": {}, "events": {Table: "events"}, "shop.events": {Schema: "shop", Table: "events"}} {
		var source driver.Named = fixtureOn(t, pool, cfg).store
		if got := source.Name(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
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

// Without Migrate, every first call returns an error that names Migrate, also if the INSERT fails at COMMIT.
func TestErrorsBeforeMigrateNameIt(t *testing.T) {
	t.Parallel()
	pgtest.New(t)
	pgtest.InEveryMode(t, func(t *testing.T, inMode func(*pgxpool.Pool) *pgxpool.Pool) {
		direct, schema := pgtest.NewSchema(t)
		for name, where := range map[string]string{"no table": schema, "no schema": "nowhere"} {
			f := fixtureOn(t, inMode(direct), outboxpgx.Config{Schema: where})
			for call, err := range f.callAll(t.Context()) {
				if err == nil || !strings.Contains(err.Error(), "call Store.Migrate first") {
					t.Errorf("%s, %s: %v", name, call, err)
				}
				if _, ok := errors.AsType[*pgconn.PgError](err); !ok {
					t.Errorf("%s, %s: no PgError in %v", name, call, err)
				}
			}
		}
	})
}

// callAll returns the errors of all calls that need the tables.
func (f *fixture) callAll(ctx context.Context) map[string]error {
	m := outbox.Message{Name: "a", Body: []byte("1")}
	batch := driver.Batch{Leases: []driver.Lease{{}}}
	all := map[string]error{
		"write": f.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return f.store.Write(ctx, tx, m) }),
		"write once": f.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			_, _, err := f.store.WriteOnce(ctx, tx, "key", m)
			return err
		}),
		"write on a raw transaction": pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) error { return f.store.Write(ctx, tx, m, m) }),
		"replay":                     second(f.dead.Replay(ctx, outbox.Filter{}, outbox.Replay{By: "me"})),
		"remove":                     second(f.dead.Remove(ctx, outbox.Filter{}, outbox.Removal{By: "me"})),
		"list":                       second(f.dead.List(ctx, outbox.Filter{})),
		"show":                       second(f.dead.Show(ctx, uuid.New())),
		"count":                      second(f.dead.Count(ctx, outbox.Filter{})),
		"audit":                      second(f.store.Audit(ctx, 0)),
		"claim":                      second(f.store.Claim(ctx, driver.Claim{Limit: 1, Lease: time.Second})),
		"settle":                     second(f.store.Settle(ctx, batch, nil)),
		"stats":                      second(f.store.Depth(ctx)),
		"prune":                      second(f.store.Prune(ctx)),
	}
	db := stdlib.OpenDBFromPool(f.pool)
	defer db.Close()
	if tx, err := db.BeginTx(ctx, nil); err == nil {
		all["write with database/sql"] = f.store.Write(ctx, txretrysql.Wrap(tx), m)
		_ = tx.Rollback()
	}
	return all
}

// An error about a missing table of another program does not mention Migrate.
func TestErrorsOfOtherTables(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.exec(t, `
		CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO elsewhere VALUES (1); RETURN NULL; END $$;
		CREATE TRIGGER watch AFTER INSERT ON holdfast_outbox EXECUTE FUNCTION watch()`)
	err := f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		return f.store.Write(ctx, tx, outbox.Message{Name: "a", Body: []byte("1")})
	})
	if err == nil || strings.Contains(err.Error(), "Migrate") {
		t.Errorf("the error is %v", err)
	}
}
