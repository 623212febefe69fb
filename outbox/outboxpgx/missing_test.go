package outboxpgx_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

// Whoever forgets Migrate is told so by whatever is called first, also where the INSERT fails at COMMIT.
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

// callAll returns the error of everything that needs the tables.
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

// A table of somebody else that is missing is no reason to call Migrate.
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
