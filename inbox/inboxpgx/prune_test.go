package inboxpgx_test

import (
	"errors"
	"math"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

func TestPrune(t *testing.T) {
	t.Parallel()
	for _, isolation := range []string{"read committed", "serializable"} {
		t.Run("default "+isolation, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t, pgtest.URL(t)+"&default_transaction_isolation="+url.PathEscape(isolation), 10)
			createTables(t, pool)
			pruneBySeveral(t, pool)
		})
	}
}

func pruneBySeveral(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
		SELECT consumer, gen_random_uuid(), now() - interval '8 days' + interval '1 minute' * (n - 2500.5)
		FROM generate_series(1, 5000) n, unnest('{a,b}'::text[]) consumer`)
	if err != nil {
		t.Fatal(err)
	}
	manager := newManager(t, pool)
	var wg sync.WaitGroup
	var total atomic.Int64
	for range 3 {
		wg.Go(func() {
			n, err := newStore(t, manager, "a", inboxpgx.Config{}).Prune(t.Context())
			if err != nil {
				t.Error(err)
			}
			total.Add(int64(n))
		})
	}
	wg.Wait()
	var left, tooOld int
	err = pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE consumer = 'a' AND processed_at < now() - interval '8 days') FROM holdfast_inbox`).Scan(&left, &tooOld)
	if err != nil || total.Load() != 2500 || left != 7500 || tooOld != 0 {
		t.Errorf("pruned %d, left %d, too old %d, error %v", total.Load(), left, tooOld, err)
	}
}

// The times of entries are rounded; none is pruned before it has outlived the retention.
func TestPruneNoneTooYoung(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	exec(t, pool, `CREATE TABLE exact AS SELECT gen_random_uuid() AS id, now() - interval '8 days' + n * interval '10 milliseconds' AS made FROM generate_series(-200, 200) n`)
	exec(t, pool, `INSERT INTO holdfast_inbox (consumer, message_id, processed_at) SELECT 'a', id, made FROM exact`)
	if _, err := newStore(t, newManager(t, pool), "a", inboxpgx.Config{}).Prune(t.Context()); err != nil {
		t.Fatal(err)
	}
	var gone, young int
	err := pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE made > now() - interval '8 days')
		FROM exact WHERE id NOT IN (SELECT message_id FROM holdfast_inbox)`).Scan(&gone, &young)
	if err != nil || gone == 0 || young > 0 {
		t.Errorf("%d entries are pruned, %d of them too early, error %v", gone, young, err)
	}
}

// A retention without end deletes nothing.
func TestRetentionForever(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	exec(t, pool, `INSERT INTO holdfast_inbox (consumer, message_id, processed_at) VALUES ('a', gen_random_uuid(), now() - interval '10 years')`)
	s := newStore(t, newManager(t, pool), "a", inboxpgx.Config{Retention: math.MaxInt64})
	if n, err := s.Prune(t.Context()); n != 0 || err != nil {
		t.Errorf("pruned %d, error %v", n, err)
	}
	if err := s.Check(t.Context()); err != nil {
		t.Errorf("Check: %v", err)
	}
}

// The index by time takes a few bytes of each entry, since many have the same second.
func TestEntriesAreSmall(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	exec(t, pool, `INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
		SELECT 'billing', (lpad(to_hex(n), 12, '0') || '70008000000000000000')::uuid, now() + n * interval '10 milliseconds' FROM generate_series(1, 30000) n`)
	var each float64
	err := pool.QueryRow(t.Context(), `SELECT pg_total_relation_size('holdfast_inbox') / 30000.0`).Scan(&each)
	if err != nil || each > 115 {
		t.Errorf("an entry takes %.0f bytes with its indexes, error %v", each, err)
	}
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{ByName: map[string]inboxpgx.HandlerConfig{conformance.Name: {}}})
	want := func(problem string) {
		t.Helper()
		err := p.Check(t.Context())
		if problem == "" {
			if err != nil {
				t.Errorf("Check: %v", err)
			}
			return
		}
		found, _ := errors.AsType[interface {
			error
			Mend() string
		}](err)
		if found == nil || found.Mend() == "" || strings.Count(err.Error(), "\n") != 0 || !strings.Contains(err.Error(), problem) {
			t.Errorf("Check: %v, want one finding with %q", err, problem)
		}
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	handle(t, p, noEffect)
	want("does not exist")
	createTables(t, pool)
	want("")
	exec(`INSERT INTO holdfast_inbox (consumer, message_id, processed_at) VALUES ('a', gen_random_uuid(), now() - interval '10 days')`)
	want("older than the retention")
	exec(`UPDATE holdfast_inbox SET consumer = 'it''s gone'`)
	want(`consumer "it's gone"`)
	exec(`TRUNCATE holdfast_inbox`)
	exec(`ALTER TABLE holdfast_inbox DROP CONSTRAINT holdfast_inbox_pkey`)
	want("no unique index")
	exec(`CREATE UNIQUE INDEX ON holdfast_inbox (message_id, consumer)`)
	want("")
	exec(`ALTER TABLE holdfast_inbox_pause RENAME TO away`)
	want("of consumers that are paused does not exist")
	exec(`ALTER TABLE away RENAME TO holdfast_inbox_pause`)
	exec(`DROP TABLE holdfast_inbox_attempts`)
	want("of the ledger does not exist")
}

func TestPruneLedger(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_inbox_attempts (consumer, message_id, replays, attempt, open, updated_at)
		SELECT 'a', gen_random_uuid(), 0, 2, 0, now() - interval '1 day' * n FROM generate_series(1, 15) n`)
	if err != nil {
		t.Fatal(err)
	}
	store := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
	if n, err := store.Prunable(t.Context()); n != 8 || err != nil {
		t.Errorf("Prunable = %d, %v", n, err)
	}
	if n, err := store.Prune(t.Context()); n != 8 || err != nil {
		t.Errorf("pruned %d, error %v", n, err)
	}
	var left int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_inbox_attempts`).Scan(&left); err != nil || left != 7 {
		t.Errorf("%d entries left, error %v", left, err)
	}
}
