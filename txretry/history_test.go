package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// A log is a key whose value is the list of the calls that have written it. Its length is a version, and its last
// entries show the order of all writes.
const logSQL = `create table log (key int primary key, calls int[] not null);
	insert into log select k, '{}' from generate_series(1, 4) k`

var errAbandoned = errors.New("abandoned by fn")

// player makes random calls and keeps the history of those that committed.
type player struct {
	m   *txretry.Manager
	mu  sync.Mutex
	all map[int]*deed
}

// play makes a call that reads some keys and appends its number to some of them: it writes the read value and its
// number.
func (p *player) play(ctx context.Context, rng *rand.Rand, id int) error {
	keys := rng.Perm(4)[:1+rng.IntN(3)]
	writes := rng.IntN(len(keys) + 1)
	abandon := rng.IntN(8) == 0
	atCommit := rng.IntN(2) == 0
	pause := time.Duration(rng.IntN(500)) * time.Microsecond
	var d *deed
	err := p.m.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		d = &deed{reads: map[int]int{}, writes: map[int]bool{}}
		for i, k := range keys {
			var calls []int
			if err := tx.QueryRow(ctx, "select calls from log where key = $1", k+1).Scan(&calls); err != nil {
				return err
			}
			d.reads[k] = len(calls)
			if _, err := tx.Exec(ctx, "select pg_sleep($1)", pause.Seconds()); err != nil {
				return err
			}
			if i >= writes {
				continue
			}
			d.writes[k] = true
			const update = "update log set calls = $2 where key = $1"
			if calls = append(calls, id); atCommit {
				txretry.AtCommit(tx, update, k+1, calls)
			} else if _, err := tx.Exec(ctx, update, k+1, calls); err != nil {
				return err
			}
		}
		if abandon {
			return errAbandoned
		}
		return nil
	})
	if abandon && errors.Is(err, errAbandoned) {
		return nil
	}
	if err == nil {
		p.mu.Lock()
		p.all[id] = d
		p.mu.Unlock()
	}
	return err
}

// Whatever the schedule, exactly the calls that returned nil took effect. Each took effect once, as if they had run
// one after another.
func TestHistoriesAreSerializable(t *testing.T) {
	t.Parallel()
	const workers, each = 6, 6
	for seed := range uint64(1 + testenv.Rounds(t)) {
		pool := pgtest.New(t)
		exec(t, pool, logSQL)
		cfg := txretry.Config{MaxAttempts: 1000, BaseDelay: time.Millisecond, MaxDelay: 10 * time.Millisecond}
		p := &player{m: newManager(t, pool, cfg), all: map[int]*deed{}}
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(seed, uint64(w)))
				for i := range each {
					if err := p.play(t.Context(), rng, w*each+i); err != nil {
						t.Errorf("seed %d: %v", seed, err)
					}
				}
			})
		}
		wg.Wait()
		if err := check(p.all, logs(t, pool)); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		if len(p.all) < workers*each/2 {
			t.Errorf("seed %d: only %d calls committed", seed, len(p.all))
		}
	}
}

func logs(t *testing.T, pool *pgxpool.Pool) (order [][]int) {
	t.Helper()
	rows, _ := pool.Query(t.Context(), "select calls from log order by key")
	order, err := pgx.CollectRows(rows, pgx.RowTo[[]int])
	if err != nil {
		t.Fatal(err)
	}
	return order
}

// deed records a committed call: the version of each key that it read, and the keys that it wrote.
type deed struct {
	reads  map[int]int
	writes map[int]bool
}

// check compares the deeds with the final logs. They are serializable if the relation "must have come before" has no
// cycle.
func check(all map[int]*deed, order [][]int) error {
	before := map[int][]int{} // call → the calls that must come after it
	for key, calls := range order {
		written := map[int]bool{}
		for at, id := range calls {
			d := all[id]
			switch {
			case d == nil || !d.writes[key]:
				return fmt.Errorf("key %d: write of call %d, which did not commit it", key, id)
			case written[id]:
				return fmt.Errorf("key %d: call %d is applied twice", key, id)
			case d.reads[key] != at:
				return fmt.Errorf("key %d: call %d read version %d and wrote version %d", key, id, d.reads[key], at+1)
			}
			written[id] = true
		}
		for id, d := range all {
			if d.writes[key] && !written[id] {
				return fmt.Errorf("key %d: write of call %d is lost", key, id)
			}
			version, read := d.reads[key]
			if !read {
				continue
			}
			if version > 0 {
				before[calls[version-1]] = append(before[calls[version-1]], id)
			}
			if version < len(calls) && calls[version] != id {
				before[id] = append(before[id], calls[version])
			}
		}
	}
	return acyclic(before)
}

// acyclic looks for a cycle by depth-first search.
func acyclic(before map[int][]int) error {
	const entered, left = 1, 2
	state := map[int]int{}
	var visit func(id int) error
	visit = func(id int) error {
		state[id] = entered
		for _, next := range before[id] {
			if state[next] == entered {
				return fmt.Errorf("not serializable: call %d must come before itself", next)
			}
			if state[next] == 0 {
				if err := visit(next); err != nil {
					return err
				}
			}
		}
		state[id] = left
		return nil
	}
	for id := range before {
		if state[id] == 0 {
			if err := visit(id); err != nil {
				return err
			}
		}
	}
	return nil
}

// walk makes random steps in a transaction: open savepoints, savepoints that only the server knows, failing
// statements, unread rows. Each successful step writes one row immediately and one through AtCommit, and adds a note
// through AfterCommit.
type walk struct {
	rng   *rand.Rand
	steps int
	noted []int
	bare  bool // may use the bare connection
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

// foreign runs statements that create or end a savepoint of the user.
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

// Whatever fn does, the rows written immediately, the rows written at COMMIT and the notes are the same.
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
