package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
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
	exec(t, pool, `INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
		SELECT consumer, gen_random_uuid(), now() - interval '8 days' + interval '1 minute' * (n - 2500.5)
		FROM generate_series(1, 5000) n, unnest('{a,b}'::text[]) consumer`)
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
	err := pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE consumer = 'a' AND processed_at < now() - interval '8 days') FROM holdfast_inbox`).Scan(&left, &tooOld)
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

func exec(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	noError(t, err)
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
	handle(t, p, noEffect)
	want("does not exist")
	createTables(t, pool)
	want("")
	exec(t, pool, `INSERT INTO holdfast_inbox (consumer, message_id, processed_at) VALUES ('a', gen_random_uuid(), now() - interval '10 days')`)
	want("older than the retention")
	exec(t, pool, `UPDATE holdfast_inbox SET consumer = 'it''s gone'`)
	want(`consumer "it's gone"`)
	exec(t, pool, `TRUNCATE holdfast_inbox`)
	exec(t, pool, `ALTER TABLE holdfast_inbox DROP CONSTRAINT holdfast_inbox_pkey`)
	want("no unique index")
	exec(t, pool, `CREATE UNIQUE INDEX ON holdfast_inbox (message_id, consumer)`)
	want("")
	exec(t, pool, `ALTER TABLE holdfast_inbox_pause RENAME TO away`)
	want("of consumers that are paused does not exist")
	exec(t, pool, `ALTER TABLE away RENAME TO holdfast_inbox_pause`)
	exec(t, pool, `DROP TABLE holdfast_inbox_attempts`)
	want("of the ledger does not exist")
}

// parkCopy processes a message and parks a copy of it behind a dead letter, as happens when the connection is
// lost before the acknowledgements of both. It returns the message.
func parkCopy(t *testing.T, s *inboxpgx.Store) *inbox.Message {
	t.Helper()
	m, head := numbered(0), numbered(1)
	head.Queue = "orders"
	noError(t, process(t, s, m))
	dead := driver.NewDeadLetter(head, driver.Classify(inbox.Unrecoverable(errors.New("no"))), "a", time.Now())
	noError(t, errors.Join(s.Parking(true).Stop(t.Context(), "k", dead), s.Parking(true).Append(t.Context(), "k", m)))
	return m
}

// goOn removes the dead letter and has the copy behind it processed, as a consumer does.
func goOn(t *testing.T, s *inboxpgx.Store, want uuid.UUID) {
	t.Helper()
	parking, lease := s.Parking(true), driver.Lease{Owner: uuid.New(), For: time.Minute}
	letters := driver.NewDeadLetters(parking, s.Retention(), slog.New(slog.DiscardHandler))
	if n, err := letters.Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "test", Reason: "test"}); n != 1 || err != nil {
		t.Fatalf("%d dead letters removed, error %v", n, err)
	}
	m, _, err := parking.Claim(t.Context(), "k", lease)
	if err != nil || m == nil || m.ID != want {
		t.Fatalf("claimed %v, error %v", m, err)
	}
	noError(t, errors.Join(process(t, s, m), parking.Done(t.Context(), lease.Owner, m)))
}

func prune(t *testing.T, s *inboxpgx.Store, want int) {
	t.Helper()
	if n, err := s.Prunable(t.Context()); n != want || err != nil {
		t.Errorf("Prunable = %d, want %d, error %v", n, want, err)
	}
	if n, err := s.Prune(t.Context()); n != want || err != nil {
		t.Errorf("pruned %d, want %d, error %v", n, want, err)
	}
}

// A message that was processed and waits once more, behind a dead letter, is known for as long as it waits.
func TestPruneKeepsWhatIsParked(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := effectStore(t, newManager(t, pool))
	m := parkCopy(t, s)
	other := newStore(t, newManager(t, pool), "b", inboxpgx.Config{})
	handle(t, other, noEffect)
	if err := process(t, other, m); err != nil { // nothing waits there
		t.Fatal(err)
	}
	outlive := func() { exec(t, pool, `UPDATE holdfast_inbox SET processed_at = now() - interval '10 days'`) }
	outlive()
	noError(t, process(t, s, numbered(2)))
	prune(t, s, 0)
	prune(t, other, 1)
	if err := s.Check(t.Context()); err != nil {
		t.Errorf("Check: %v", err)
	}
	goOn(t, s, m.ID)
	wantOneEffectEach(t, pool, 2)
	outlive()
	prune(t, s, 2)
}

func TestFakeKeepsWhatIsParked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, entries := fakeStore(t)
		runs := map[int]int{}
		handle(t, s, func(_ context.Context, _ pgx.Tx, e conformance.Event) error { runs[e.Number]++; return nil })
		m := parkCopy(t, s)
		old := numbered(2)
		noError(t, process(t, s, old))
		time.Sleep(2 * time.Hour)
		if err := process(t, s, numbered(3)); err != nil { // when others are written the old ones go
			t.Fatal(err)
		}
		if entries.Seen("a", old.ID) {
			t.Error("what waits nowhere is still known")
		}
		goOn(t, s, m.ID)
		if runs[0] != 1 {
			t.Errorf("%d runs of the message", runs[0])
		}
		time.Sleep(2 * time.Hour)
		noError(t, process(t, s, numbered(4)))
		if entries.Seen("a", m.ID) {
			t.Error("the message is known for ever")
		}
	})
}

// parkEntries parks some of the entries.
func parkEntries(t *testing.T, pool *pgxpool.Pool, which string) {
	t.Helper()
	exec(t, pool, `INSERT INTO holdfast_inbox_parked (consumer, key, message_id, replays, name, envelope, body)
		SELECT consumer, 'k', message_id, 0, 'x', '{}', '' FROM holdfast_inbox WHERE `+which)
}

// The table may be partitioned by the administrator. Rows of two partitions can have the same tuple id then, and
// only what has outlived the retention, and waits nowhere, is pruned all the same.
func TestPrunePartitioned(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	createTables(t, pool)
	for _, sql := range []string{
		`ALTER TABLE holdfast_inbox RENAME TO plain`,
		`CREATE TABLE holdfast_inbox (LIKE plain INCLUDING DEFAULTS, PRIMARY KEY (consumer, message_id)) PARTITION BY HASH (consumer, message_id)`,
		`CREATE TABLE entries_0 PARTITION OF holdfast_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 0)`,
		`CREATE TABLE entries_1 PARTITION OF holdfast_inbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)`,
		`CREATE INDEX ON holdfast_inbox (consumer, processed_at)`,
		`INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
			SELECT 'a', gen_random_uuid(), now() - CASE WHEN n % 2 = 0 THEN interval '9 days' ELSE interval '1 day' END FROM generate_series(1, 2000) n`,
	} {
		exec(t, pool, sql)
	}
	parkEntries(t, pool, `processed_at < now() - interval '8 days' AND hashtext(message_id::text) % 2 = 0`)
	var parked int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_inbox_parked`).Scan(&parked); err != nil || parked == 0 {
		t.Fatalf("%d parked, error %v", parked, err)
	}
	n, err := newStore(t, newManager(t, pool), "a", inboxpgx.Config{}).Prune(t.Context())
	var young, old int
	if err == nil {
		err = pool.QueryRow(t.Context(), `SELECT count(*) FILTER (WHERE processed_at > now() - interval '8 days'), count(*) FILTER (WHERE processed_at <= now() - interval '8 days')
			FROM holdfast_inbox`).Scan(&young, &old)
	}
	if err != nil || n != 1000-parked || young != 1000 || old != parked {
		t.Errorf("pruned %d (%v), left are %d of 1,000 that are young, and %d old ones, of which %d wait", n, err, young, old, parked)
	}
}

// A consumer that runs prunes the entries of its store without being told, also when several
// processes do, and ends with Run.
func TestConsumersPrune(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	left := func() (n int) {
		t.Helper()
		err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM holdfast_inbox) + (SELECT count(*) FROM holdfast_inbox_attempts)`).Scan(&n)
		noError(t, err)
		return n
	}
	exec(t, pool, `INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
		SELECT 'a', gen_random_uuid(), now() - interval '9 days' FROM generate_series(1, 3000)`)
	exec(t, pool, `INSERT INTO holdfast_inbox_attempts (consumer, message_id, replays, attempt, open, updated_at)
		SELECT 'a', gen_random_uuid(), 0, 2, 0, now() - interval '1 day' * n FROM generate_series(1, 15) n`)
	exec(t, pool, `INSERT INTO holdfast_inbox (consumer, message_id) VALUES ('a', gen_random_uuid())`)
	exec(t, pool, `INSERT INTO holdfast_inbox (consumer, message_id, processed_at) VALUES ('b', gen_random_uuid(), now() - interval '9 days')`)

	if n, err := newStore(t, newManager(t, pool), "a", inboxpgx.Config{}).Prunable(t.Context()); n != 3000+8 || err != nil {
		t.Errorf("Prunable = %d, %v", n, err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for range 3 {
		p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{PruneInterval: 50 * time.Millisecond})
		running.Go(func() { p.Background(ctx) })
	}
	testenv.Eventually(t, func() error {
		if n := left(); n != 2+7 { // the new one, that of another consumer, and the younger half of the ledger
			return fmt.Errorf("%d rows are left", n)
		}
		return nil
	})
	stop()
	running.Wait()
}

func TestNegativePruneInterval_isOff(t *testing.T) {
	t.Parallel()
	p := newStore(t, newManager(t, newPool(t)), "a", inboxpgx.Config{PruneInterval: -1})
	p.Background(t.Context()) // returns by itself
}
