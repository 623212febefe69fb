package inboxpgx_test

import (
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
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
	if _, err := inboxpgx.Prune(t.Context(), newPool(t), inboxpgx.PruneConfig{Retention: -1, ChunkSize: -1, Table: "a b"}); err == nil ||
		!strings.Contains(err.Error(), "Retention") || !strings.Contains(err.Error(), "ChunkSize") || !strings.Contains(err.Error(), "table") {
		t.Errorf("error = %v", err)
	}
}

func pruneBySeveral(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
		SELECT 'a', gen_random_uuid(), now() - interval '8 days' + interval '1 minute' * (n - 25.5) FROM generate_series(1, 50) n`)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	var total atomic.Int64
	for range 3 {
		wg.Go(func() {
			n, err := inboxpgx.Prune(t.Context(), pool, inboxpgx.PruneConfig{ChunkSize: 4})
			if err != nil {
				t.Error(err)
			}
			total.Add(n)
		})
	}
	wg.Wait()
	var left, tooOld int
	err = pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE processed_at < now() - interval '8 days') FROM holdfast_inbox`).Scan(&left, &tooOld)
	if err != nil || total.Load() != 25 || left != 25 || tooOld != 0 {
		t.Errorf("pruned %d, left %d, too old %d, error %v", total.Load(), left, tooOld, err)
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	want := func(problem string) {
		t.Helper()
		findings, err := inboxpgx.Check(t.Context(), pool, inboxpgx.PruneConfig{})
		switch {
		case err != nil:
			t.Errorf("Check: %v", err)
		case problem == "" && len(findings) != 0:
			t.Errorf("findings = %v", findings)
		case problem != "" && (len(findings) != 1 || !strings.Contains(findings[0].Problem, problem) || findings[0].Mend == ""):
			t.Errorf("findings = %v, want one with %q", findings, problem)
		}
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	want("does not exist")
	createTables(t, pool)
	want("")
	exec(`INSERT INTO holdfast_inbox (consumer, message_id, processed_at) VALUES ('a', gen_random_uuid(), now() - interval '10 days')`)
	want("older than the retention")
	exec(`TRUNCATE holdfast_inbox`)
	exec(`ALTER TABLE holdfast_inbox DROP CONSTRAINT holdfast_inbox_pkey`)
	want("no unique index")
	exec(`CREATE UNIQUE INDEX ON holdfast_inbox (message_id, consumer)`)
	want("")
	exec(`DROP TABLE holdfast_inbox_attempts`)
	want("of the Ledger does not exist")
}

func TestPruneLedger(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	_, err := pool.Exec(t.Context(), `INSERT INTO holdfast_inbox_attempts (consumer, message_id, replays, attempt, open, updated_at)
		SELECT 'a', gen_random_uuid(), 0, 2, 0, now() - interval '1 day' * n FROM generate_series(1, 15) n`)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := inboxpgx.Prune(t.Context(), pool, inboxpgx.PruneConfig{ChunkSize: 3}); n != 0 || err != nil {
		t.Errorf("pruned %d, error %v", n, err)
	}
	var left int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_inbox_attempts`).Scan(&left); err != nil || left != 7 {
		t.Errorf("%d entries left, error %v", left, err)
	}
}
