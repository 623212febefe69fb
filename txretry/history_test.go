package txretry_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// A log is a key whose value is the list of the calls that have appended to it, as in the list-append workload of
// Jepsen's checker Elle. The last lists show the order of all appends, and each read shows its place in that order.
const logSQL = `create table log (key int primary key, calls int[] not null);
	insert into log select k, '{}' from generate_series(1, 4) k`

var errAbandoned = errors.New("abandoned by fn")

// player makes random calls and keeps the history of those that committed.
type player struct {
	m   *txretry.Manager
	mu  sync.Mutex
	all map[int]*deed
}

// play makes a call that reads some keys and appends its number to some of them: it writes the read list and its
// number.
func (p *player) play(ctx context.Context, rng *rand.Rand, id int) error {
	keys := rng.Perm(4)[:1+rng.IntN(3)]
	writes := rng.IntN(len(keys) + 1)
	abandon := rng.IntN(8) == 0
	atCommit := rng.IntN(2) == 0
	pause := time.Duration(rng.IntN(500)) * time.Microsecond
	var d *deed
	err := p.m.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		d = &deed{reads: map[int][]int{}, writes: map[int]bool{}}
		for i, k := range keys {
			var calls []int
			if err := tx.QueryRow(ctx, "select calls from log where key = $1", k+1).Scan(&calls); err != nil {
				return err
			}
			d.reads[k] = slices.Clone(calls)
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
// one after another: the history has none of Elle's anomalies.
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

// deed records a committed call: the list that it read of each key, and the keys to which it appended.
type deed struct {
	reads  map[int][]int
	writes map[int]bool
}

// The kinds of dependency between two calls, as Adya and Elle name them: the second call appends after the first one,
// reads its append, or appends after its read.
type dependency int

const (
	ww dependency = iota + 1
	wr
	rw
)

// history has the dependencies between calls: from a call to the calls that must come after it.
type history map[int]map[int]map[dependency]bool

func (h history) add(first, second int, kind dependency) {
	if first == second {
		return
	}
	if h[first] == nil {
		h[first] = map[int]map[dependency]bool{}
	}
	if h[first][second] == nil {
		h[first][second] = map[dependency]bool{}
	}
	h[first][second][kind] = true
}

// check compares the deeds with the last lists, as Elle checks a list-append history: no read of an append that did not
// commit (G1a), no lost, repeated or overwritten append, and no cycle of dependencies.
func check(all map[int]*deed, order [][]int) error {
	h := history{}
	for key, calls := range order {
		written := map[int]bool{}
		for at, id := range calls {
			d := all[id]
			switch {
			case d == nil || !d.writes[key]:
				return fmt.Errorf("key %d: append of call %d, which did not commit it", key, id)
			case written[id]:
				return fmt.Errorf("key %d: call %d is applied twice", key, id)
			}
			written[id] = true
			if at > 0 {
				h.add(calls[at-1], id, ww)
			}
		}
		for id, d := range all {
			read, known := d.reads[key]
			switch {
			case d.writes[key] && !written[id]:
				return fmt.Errorf("key %d: append of call %d is lost", key, id)
			case !known:
				continue
			case len(read) > len(calls) || !slices.Equal(read, calls[:len(read)]):
				return fmt.Errorf("key %d: G1a: call %d read %v, and committed is %v", key, id, read, calls)
			}
			if n := len(read); n > 0 {
				h.add(calls[n-1], id, wr)
			}
			if len(read) < len(calls) {
				h.add(id, calls[len(read)], rw)
			}
		}
	}
	return h.acyclic()
}

// acyclic returns an error with Elle's name of the worst cycle: G0 (appends only), G1c (appends and reads of them),
// G-single (one append after a read) or G2-item (several).
func (h history) acyclic() error {
	for _, anomaly := range []struct {
		name  string
		kinds []dependency // of the way back
		last  dependency   // closes the cycle
	}{
		{"G0", []dependency{ww}, ww},
		{"G1c", []dependency{ww, wr}, wr},
		{"G-single", []dependency{ww, wr}, rw},
		{"G2-item", []dependency{ww, wr, rw}, rw},
	} {
		for first, after := range h {
			for second, kinds := range after {
				if kinds[anomaly.last] && h.leads(second, first, anomaly.kinds, map[int]bool{}) {
					return fmt.Errorf("not serializable: %s: call %d must come before itself", anomaly.name, first)
				}
			}
		}
	}
	return nil
}

// leads reports whether dependencies of some kinds lead from one call to another.
func (h history) leads(from, to int, kinds []dependency, seen map[int]bool) bool {
	if from == to {
		return true
	}
	seen[from] = true
	for next, has := range h[from] {
		if !seen[next] && slices.ContainsFunc(kinds, func(k dependency) bool { return has[k] }) && h.leads(next, to, kinds, seen) {
			return true
		}
	}
	return false
}

// The check finds each anomaly, and names the worst one.
func TestCheck_findsAnomalies(t *testing.T) {
	t.Parallel()
	type reads = map[int][]int
	on := func(keys ...int) map[int]bool {
		m := map[int]bool{}
		for _, k := range keys {
			m[k] = true
		}
		return m
	}
	for name, tt := range map[string]struct {
		all   map[int]*deed
		order [][]int
		want  string // "": serializable
	}{
		"one after the other": {map[int]*deed{1: {reads{0: {}}, on(0)}, 2: {reads{0: {1}}, on(0)}, 3: {reads{0: {1}}, nil}}, [][]int{{1, 2}}, ""},
		"write of an aborted": {map[int]*deed{}, [][]int{{1}}, "did not commit"},
		"write twice":         {map[int]*deed{1: {reads{0: {}}, on(0)}}, [][]int{{1, 1}}, "twice"},
		"lost write":          {map[int]*deed{1: {reads{0: {}}, on(0)}, 2: {reads{0: {}}, on(0)}}, [][]int{{2}}, "lost"},
		"aborted read":        {map[int]*deed{1: {reads{0: {7}}, nil}}, [][]int{{}}, "G1a"},
		"dirty write":         {map[int]*deed{1: {nil, on(0, 1)}, 2: {nil, on(0, 1)}}, [][]int{{1, 2}, {2, 1}}, "G0"},
		"circular flow":       {map[int]*deed{1: {reads{1: {2}}, on(0)}, 2: {reads{0: {1}}, on(1)}}, [][]int{{1}, {2}}, "G1c"},
		"lost update":         {map[int]*deed{1: {reads{0: {}}, on(0)}, 2: {reads{0: {}}, on(0)}}, [][]int{{1, 2}}, "G-single"},
		"read skew":           {map[int]*deed{1: {nil, on(0, 1)}, 2: {reads{0: {}, 1: {1}}, nil}}, [][]int{{1}, {1}}, "G-single"},
		"write skew":          {map[int]*deed{1: {reads{0: {}, 1: {}}, on(0)}, 2: {reads{0: {}, 1: {}}, on(1)}}, [][]int{{1}, {2}}, "G2-item"},
	} {
		if err := check(tt.all, tt.order); (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
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
