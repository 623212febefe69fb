package txretry_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// walk does random things with a transaction: savepoints left open, savepoints that only the server
// knows, statements that fail, rows left unread. Each step that succeeds writes a row at once, one through AtCommit, and
// notes itself through AfterCommit.
type walk struct {
	rng   *rand.Rand
	steps int
	noted []int
	bare  bool // whether it may use the bare connection
}

func (w *walk) in(ctx context.Context, tx pgx.Tx, depth int) {
	for range 1 + w.rng.IntN(5) {
		switch w.rng.IntN(20) {
		case 0, 1, 2, 3, 4:
			w.step(ctx, tx)
		case 5:
			_, _ = tx.Exec(ctx, "select 1/0")
		case 6:
			rows, _ := tx.Query(ctx, "select generate_series(1, 3)")
			if w.rng.IntN(4) > 0 {
				rows.Close()
			}
		case 7, 8, 9, 10, 11, 12, 13:
			w.foreign(ctx, tx)
		default:
			if inner, err := tx.Begin(ctx); err == nil && depth < 3 {
				w.in(ctx, inner, depth+1)
				w.end(ctx, inner)
			}
		}
	}
}

func (w *walk) step(ctx context.Context, tx pgx.Tx) {
	w.steps++
	n := w.steps
	if _, err := tx.Exec(ctx, "insert into at_once values ($1)", n); err == nil {
		if insert := "insert into at_commit values ($1)"; !txretry.AtCommit(tx, insert, n) {
			_, _ = tx.Exec(ctx, insert, n)
		}
		txretry.AfterCommit(tx, func() { w.noted = append(w.noted, n) })
	}
}

// foreign runs what sets or ends a savepoint of the user's own.
func (w *walk) foreign(ctx context.Context, tx pgx.Tx) {
	name := string("ab"[w.rng.IntN(2)])
	set, back, release := "savepoint "+name, "rollback to "+name, "release "+name
	sql := [...]string{
		set, set, set, back, back, "/* select */ -- select\nRollBack\tWork To SavePoint \"" + name + "\"", release,
		"insert into at_once values (0); " + back + "; " + set, "delete from at_once where n = 0;" + back,
		back + ";select 1", "rollback and chain",
	}[w.rng.IntN(11)]
	switch w.rng.IntN(7) {
	case 0, 1:
		_, _ = tx.Exec(ctx, sql)
	case 2:
		rows, _ := tx.Query(ctx, sql)
		rows.Close()
	case 3:
		_ = tx.QueryRow(ctx, sql).Scan()
	case 4:
		var batch pgx.Batch
		batch.Queue("select 1")
		batch.Queue(sql)
		_ = tx.SendBatch(ctx, &batch).Close()
	case 5:
		if _, err := tx.Prepare(ctx, "select statement", sql); err == nil {
			_, _ = tx.Exec(ctx, "select statement")
			_, _ = tx.Exec(ctx, `deallocate "select statement"`)
		}
	case 6:
		if w.bare {
			_, _ = tx.Conn().Exec(ctx, sql)
		}
	}
}

func (w *walk) end(ctx context.Context, tx pgx.Tx) {
	switch w.rng.IntN(5) {
	case 0, 1:
		_ = tx.Commit(ctx)
	case 2, 3:
		_ = tx.Rollback(ctx)
	}
}

// Whatever fn does, what was written at once, at COMMIT and noted afterwards is the same.
func TestEffectsStayTogether(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	exec(t, pool, "create table at_once (n int); create table at_commit (n int)")
	m := newManager(t, pool, txretry.Config{Isolation: pgx.ReadCommitted})
	committed := 0
	for seed := range uint64(200) {
		exec(t, pool, "truncate at_once, at_commit")
		w := &walk{rng: rand.New(rand.NewPCG(seed, 1)), bare: seed%2 == 0}
		err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			w.in(ctx, tx, 0)
			return nil
		})
		atOnce, atCommit := numbers(t, pool, "at_once"), numbers(t, pool, "at_commit")
		if !slices.Equal(atOnce, atCommit) || !slices.Equal(atOnce, w.noted) || (err != nil && len(atOnce) > 0) {
			t.Fatalf("seed %d: at once %v, at commit %v, noted %v, error %v", seed, atOnce, atCommit, w.noted, err)
		}
		if len(atOnce) > 0 {
			committed++
		}
	}
	if committed < 5 {
		t.Errorf("only %d of the walks committed something", committed)
	}
}

func numbers(t *testing.T, pool *pgxpool.Pool, table string) []int {
	t.Helper()
	rows, _ := pool.Query(t.Context(), "select n from "+table+" order by n")
	all, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		t.Fatal(err)
	}
	return all
}
