package txretry_test

import (
	"context"
	"errors"
	"path"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// inEveryMode runs a test with each way in which pgx can execute a batch.
func inEveryMode(t *testing.T, test func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool)) {
	t.Helper()
	pgtest.InEveryMode(t, func(t *testing.T, inMode func(*pgxpool.Pool) *pgxpool.Pool) {
		if strings.HasPrefix(path.Base(t.Name()), "PgBouncer") {
			testenv.Nightly(t, "a variant")
		}
		pool := newCounter(t)
		observed, _ := observed()
		test(t, newManager(t, inMode(pool), observed), pool)
	})
}

const addSQL = "update counter set n = n + $1 where id = 1"

func TestAtCommit(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		for range 2 {
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				if !txretry.AtCommit(tx, addSQL, 1) {
					t.Error("AtCommit refused")
				}
				sp, err := tx.Begin(ctx)
				if err != nil {
					return err
				}
				txretry.AtCommit(tx, addSQL, 100)
				txretry.AtCommit(sp, addSQL, 1000)
				if err := sp.Rollback(ctx); err != nil {
					return err
				}
				txretry.AtCommit(tx, addSQL, 10)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		wantCounter(t, pool, 22)
	})
}

func TestAtCommitFails(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		for name, tt := range map[string]struct {
			sql  string
			args []any
			code string // "": differs between the modes
		}{
			"unique violation":  {"insert into counter values (1, 0)", nil, "23505"},
			"no such table":     {"insert into missing values (1)", nil, "42P01"},
			"bad argument":      {addSQL, []any{make(chan int)}, ""},
			"too few arguments": {addSQL, nil, ""},
		} {
			calls := 0
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				calls++
				txretry.AfterCommit(tx, func() { t.Errorf("%s: AfterCommit ran", name) })
				txretry.AtCommit(tx, addSQL, 1)
				txretry.AtCommit(tx, tt.sql, tt.args...)
				return add(ctx, tx, 10)
			})
			if err == nil || calls != 1 {
				t.Errorf("%s: error %v after %d calls, want an error after one", name, err, calls)
			}
			var unknown *txretry.CommitUnknownError
			if errors.As(err, &unknown) {
				t.Errorf("%s: a definite rollback is called unknown: %v", name, err)
			}
			if tt.code != "" {
				wantSQLSTATE(t, err, tt.code)
			}
		}
		wantCounter(t, pool, 0)
	})
}

func TestAtCommitRetried(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		exec(t, pool, `create function lose() returns int language plpgsql as
			$$ begin raise exception 'test' using errcode = '40001'; end $$`)
		calls := 0
		err := m.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
			calls++
			txretry.AtCommit(tx, addSQL, 1)
			if calls < 3 {
				txretry.AtCommit(tx, "select lose()")
			}
			return nil
		})
		if err != nil || calls != 3 {
			t.Fatalf("error %v after %d calls, want none after 3", err, calls)
		}
		wantCounter(t, pool, 1)
	})
}

// Do must not call committed what a statement of AtCommit has rolled back: COMMIT behind it
// is answered as if there had been something to commit.
func TestAtCommitEndsTheTransaction(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, m *txretry.Manager, pool *pgxpool.Pool) {
		for _, sql := range []string{"rollback", "commit"} {
			err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
				if !txretry.AtCommit(tx, addSQL, 1) || !txretry.AtCommit(tx, sql) {
					t.Error("not the manager's handle")
				}
				return nil
			})
			var unknown *txretry.CommitUnknownError
			if !errors.As(err, &unknown) || !errors.Is(err, txretry.ErrManaged) {
				t.Errorf("%s: error = %v, want an unknown outcome", sql, err)
			}
		}
		wantCounter(t, pool, 1)
	})
}
