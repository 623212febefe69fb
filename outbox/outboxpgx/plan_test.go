package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

func TestQueriesUseTheirIndexes(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{Retention: time.Hour})
	// The worst case for statistics: the table was analysed while empty, then filled, mostly with published rows.
	f.exec(t, `ANALYZE holdfast_outbox`)
	f.exec(t, `
		INSERT INTO holdfast_outbox (id, lane, name, body, content_type, ordering_key, published_at, due_at)
		SELECT gen_random_uuid(), n % 16, 'a', '1', 'application/json', 'k' || n % 1000,
		       CASE WHEN n % 10 < 8 THEN now() END, CASE WHEN n % 10 = 9 THEN now() + interval '1 hour' END
		FROM generate_series(1, 50000) n`)
	for name, args := range map[string][]any{
		"lower":     {},
		"read":      {int64(7), 500, []string{}, 32 << 20},
		"read runs": {int64(7), 500, []string{}, 32 << 20},
		"overdue":   {500, []string{}, nil},
		"hold due":  {[]int16{1}, 500, []string{}, nil},
		"hold":      {int64(7), 1000, []string{}},
		"release":   {[]int16{1}, 500, 5000, 500, 10, int64(100_000), []string{}, nil},
		"prune":     {int64(1), 1000, 0},
		"stats":     {1000},
	} {
		plan := f.explain(t, "setup", outboxpgx.Statement(name), args)
		if strings.Contains(plan, "Seq Scan on holdfast_outbox ") || strings.Contains(plan, "Seq Scan on holdfast_outbox o") {
			t.Errorf("%s reads the whole table:\n%s", name, plan)
		}
	}
	f.functionsUseIndexes(t)
}

// functionsUseIndexes calls the functions, whose plans cannot be shown, and checks the scan counters.
func (f *fixture) functionsUseIndexes(t *testing.T) {
	t.Helper()
	lanes, tokens, text, delays := []int16{2}, []int64{7}, []string{"x"}, []int64{1}
	var one, two, three [16]byte
	for i, id := range []*[16]byte{&one, &two, &three} {
		must(t, f.pool.QueryRow(t.Context(), `SELECT id FROM holdfast_outbox WHERE lane = 2 AND published_at IS NULL AND due_at IS NULL ORDER BY seq OFFSET $1 LIMIT 1`, i).Scan(id))
	}
	settle := []any{lanes, tokens, [][16]byte{one}, false, [][16]byte{two}, delays, text, text, [][16]byte{three}, text, text, int64(1), int64(0), false}
	kept := slices.Clone(settle)
	kept[3] = true
	for name, args := range map[string][]any{
		"claim":  {int64(8), 1000000, 16, []string{}, 500, true, []int64{9}},
		"settle": settle, "settle, kept": kept, "look": {lanes},
	} {
		tx, err := f.pool.Begin(t.Context())
		must(t, err)
		_, err = tx.Exec(t.Context(), `UPDATE holdfast_outbox_lanes SET token = 7, lease_until = now() WHERE lane = 2`)
		must(t, err)
		var before, whole, read int64
		count := `SELECT sum(pg_stat_get_xact_numscans(c.oid)) FILTER (WHERE c.relkind = 'r'), sum(pg_stat_get_xact_numscans(c.oid)) FILTER (WHERE c.relkind = 'i')
			FROM pg_class c WHERE c.oid = 'holdfast_outbox'::regclass OR c.oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'holdfast_outbox'::regclass)`
		must(t, tx.QueryRow(t.Context(), count).Scan(&before, &read))
		statement, _, _ := strings.Cut(name, ",")
		_, err = tx.Exec(t.Context(), outboxpgx.Statement(statement), args...)
		must(t, err)
		must(t, tx.QueryRow(t.Context(), count).Scan(&whole, &read))
		if whole > before || read == 0 {
			t.Errorf("%s has read the whole table %d times, and an index %d times", name, whole-before, read)
		}
		must(t, tx.Rollback(t.Context()))
	}
}

// The dead letters of a step are found by index, even if the tables were analysed when all their rows were deleted.
// Each plan is then made for no rows, and a plan that compares all rows with all looks as good.
func TestDeadLetterChanges_useIndexes(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	for _, sql := range []string{
		`INSERT INTO holdfast_outbox (id, lane, name, body, content_type) SELECT gen_random_uuid(), 0, 'a', '1', '' FROM generate_series(1, 5000)`,
		`INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error)
		 SELECT id, seq, lane, name, body, '', '', '', '', now(), 1, '', '' FROM holdfast_outbox`,
		`DELETE FROM holdfast_outbox`, `DELETE FROM holdfast_outbox_dead`, `ANALYZE holdfast_outbox, holdfast_outbox_dead`,
	} {
		f.exec(t, sql)
	}
	var ids []string
	for range 500 {
		ids = append(ids, uuid.NewString())
	}
	all := make([]any, 9)
	step := append([]any{ids}, all[1:]...)
	step = append(step, 0, "ada", "", "{}")
	for name, c := range map[string]struct {
		args  []any
		looks string
	}{
		"dead choose":  {append(all, int64(1), false), "Index Cond: (id = d"},
		"dead preview": {append(all, int64(1), false), "Index Cond: (id = d"},
		"dead groups":  {append(all, 100), "Index Cond: (died_at = COALESCE("},
		"dead return":  {append(step, int64(0), int64(0), [][]byte(nil)), "Index Cond: (id = ANY ('{"},
		"dead remove":  {step, "Index Cond: (id = ANY ('{"},
		"dead list":    {append(slices.Clone(all[:6]), 100, nil, nil, 1<<20, time.Now(), int64(7), false), "Index Cond: (ROW(died_at, seq) > ROW("},
	} {
		plan := f.explain(t, "dead setup", outboxpgx.Statement(name), c.args)
		if !strings.Contains(plan, c.looks) || strings.Contains(plan, "Join Filter: (d") || strings.Contains(plan, " Filter: (id = ANY") {
			t.Errorf("%s:\n%.5000s", name, plan)
		}
	}
}

// If a table was analysed while empty, or when all its rows were deleted, a statement still finds each row that it
// changes by id. Holding scans for the waiting rows before it writes the first row.
func TestChanges_useIndexesOnFormerlyEmptyTable(t *testing.T) {
	t.Parallel()
	const fill = `INSERT INTO holdfast_outbox (id, lane, name, body, content_type) SELECT gen_random_uuid(), 2, 'a', '1', '' FROM generate_series(1, 5000)`
	for name, statements := range map[string][]string{
		"empty": {`ANALYZE holdfast_outbox`},
		"gone":  {fill, `DELETE FROM holdfast_outbox`, `ANALYZE holdfast_outbox`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setup(t, outboxpgx.Config{})
			for _, sql := range append(statements, `UPDATE holdfast_outbox_lanes SET token = 7, lease_until = now() WHERE lane = 2`) {
				f.exec(t, sql)
			}
			for statement, args := range map[string][]any{
				"hold": {int64(7), 1000, []string{}}, "hold due": {[]int16{1}, 500, []string{}, nil}, "release": {[]int16{1}, 500, 5000, 500, 10, int64(100_000), []string{}, nil},
			} {
				plan := f.explain(t, "setup", outboxpgx.Statement(statement), args)
				before, change, _ := strings.Cut(plan, "Update on holdfast_outbox u")
				if !strings.Contains(change, "Index Cond: (id = ANY (ARRAY[") || statement != "release" && !strings.Contains(before, "WindowAgg") {
					t.Errorf("%s:\n%s", statement, plan)
				}
			}
			f.exec(t, fill)
			f.settlesByID(t)
		})
	}
}

// settlesByID makes one of very many messages fail, and checks how many index entries were read.
func (f *fixture) settlesByID(t *testing.T) {
	t.Helper()
	tx, err := f.pool.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	var id [16]byte
	must(t, tx.QueryRow(t.Context(), `SELECT id FROM holdfast_outbox ORDER BY seq LIMIT 1`).Scan(&id))
	const entries = `SELECT pg_stat_get_xact_tuples_returned('holdfast_outbox_pkey'::regclass)`
	var before, after, held int
	must(t, tx.QueryRow(t.Context(), entries).Scan(&before))
	text, none := []string{"x"}, [][16]byte{}
	_, err = tx.Exec(t.Context(), outboxpgx.Statement("settle"), []int16{2}, []int64{7}, none, false, [][16]byte{id}, []int64{1}, text, text, none, []string{}, []string{}, int64(1), int64(0), false)
	must(t, err)
	must(t, tx.QueryRow(t.Context(), entries).Scan(&after))
	must(t, tx.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox WHERE due_at IS NOT NULL`).Scan(&held))
	if held != 1 || after-before > 100 {
		t.Errorf("%d messages failed, and %d entries were read", held, after-before)
	}
}

// A list that was often read while the table was empty gets a new plan when the table is full. The single plan that
// Postgres would keep reads the whole table for every page and for every dead letter.
func TestLists_useCustomPlans(t *testing.T) {
	t.Parallel()
	cfg := pgtest.New(t).Config()
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	f := setupOn(t, pool, outboxpgx.Config{})
	lists := map[string]func() error{
		"List":    func() error { return second(f.dead.List(t.Context(), outbox.Filter{})) },
		"Groups":  func() error { return second(f.dead.Groups(t.Context(), outbox.Filter{})) },
		"Waiting": func() error { return second(f.store.Waiting(t.Context(), outbox.WaitingFilter{})) },
		"Look": func() error {
			if _, err := f.store.Look(t.Context(), uuid.New()); !errors.Is(err, outbox.ErrNotFound) {
				return fmt.Errorf("looked at an unknown message: %w", err)
			}
			return nil
		},
		"parked": func() error { return second(f.store.Parked().List(t.Context(), outbox.Filter{})) },
	}
	for name, list := range lists {
		for range 10 { // five plans for these arguments, then one for any arguments
			must(t, list())
		}
		var made, kept int
		must(t, pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE generic_plans > 0)
			FROM pg_prepared_statements WHERE statement LIKE '%holdfast\_outbox%' AND statement LIKE '%$1%' AND statement NOT LIKE '%pg\_prepared%'`).Scan(&made, &kept))
		if made == 0 || kept > 0 {
			t.Errorf("%s: %d of %d statements have one plan for all arguments", name, kept, made)
		}
		must(t, pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error { return c.Conn().DeallocateAll(t.Context()) }))
	}
}

// explain returns the plan of a statement with the settings of a transaction.
func (f *fixture) explain(t *testing.T, settings, sql string, args []any) string {
	t.Helper()
	tx, err := f.pool.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), outboxpgx.Statement(settings))
	must(t, err)
	rows, _ := tx.Query(t.Context(), "EXPLAIN "+sql, args...)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	return strings.Join(lines, "\n")
}

// meter counts the statements and round trips of a pool.
type meter struct {
	mu         sync.Mutex
	trips      int
	statements []string // without the statements that start and end transactions
}

func (m *meter) note(trips int, sql string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.trips += trips
	if sql != "" && !strings.HasPrefix(sql, "BEGIN") && !strings.HasPrefix(sql, "COMMIT") {
		m.statements = append(m.statements, sql)
	}
}

// take returns what was counted since the last take.
func (m *meter) take() (trips int, statements []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	trips, statements = m.trips, m.statements
	m.trips, m.statements = 0, nil
	return trips, statements
}

func (m *meter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	m.note(1, d.SQL)
	return ctx
}
func (m *meter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (m *meter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	m.note(1, "")
	return ctx
}
func (m *meter) TraceBatchQuery(_ context.Context, _ *pgx.Conn, d pgx.TraceBatchQueryData) {
	m.note(0, d.SQL)
}
func (m *meter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// metered returns a new pool on the server of another pool, and its meter.
func metered(t *testing.T, pool *pgxpool.Pool) (*pgxpool.Pool, *meter) {
	t.Helper()
	cfg, m := pool.Config(), &meter{}
	cfg.ConnConfig.Tracer = m
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	return pool, m
}

// A single message costs a relay two round trips and four statements: claim and read, settle and check for more.
func TestStatementsOfAMessage(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	pool, m := metered(t, f.pool)
	store, err := outboxpgx.New(pool, outboxpgx.Config{Logger: quiet, PollOnly: true, PruneInterval: -1})
	must(t, err)
	relay, err := outbox.NewRelay(store, outboxtest.NewPublisher(), outbox.RelayConfig{Logger: quiet})
	must(t, err)
	defer run(t, relay)()
	const messages = 50
	var trips, statements []int
	for range messages {
		f.write(t, outbox.Message{Name: "a", Body: []byte("1")})
		m.take()
		store.Wake()
		testenv.Eventually(t, func() error { return settled(t, f, m) })
		n, sql := m.take()
		trips, statements = append(trips, n), append(statements, len(sql))
	}
	slices.Sort(trips)
	slices.Sort(statements)
	t.Logf("trips %v, statements %v", trips, statements)
	if trips[messages/2] != 2 || statements[messages/2] != 4 {
		t.Errorf("%d round trips and %d statements a message, want 2 and 4", trips[messages/2], statements[messages/2])
	}
}

// settled returns an error while a lane is leased or a message is left.
func settled(t *testing.T, f *fixture, _ *meter) error {
	t.Helper()
	stats, err := f.store.Depth(t.Context())
	must(t, err)
	if stats.Ready > 0 || stats.Leased > 0 {
		return errors.New("the message is not settled")
	}
	return nil
}
