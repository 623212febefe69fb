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
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	pgdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

// A pause applies to all Stores of its consumer in all processes, and to no other consumer.
func TestPause(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	manager := newManager(t, pool)
	here, there := newStore(t, manager, "a", inboxpgx.Config{}), newStore(t, manager, "a", inboxpgx.Config{})
	checkPause(t, here)
	told := make(chan driver.Pause, 10)
	ctx, stop := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { there.WatchPause(ctx, func(p driver.Pause) { told <- p }) })
	defer watching.Wait()
	defer stop()
	<-told
	noError(t, here.Pause(t.Context(), "ada", "a test"))
	select { // within a poll interval of 2 s
	case p := <-told:
		if p.By != "ada" {
			t.Errorf("another process: %+v", p)
		}
	case <-time.After(testenv.Patience):
		t.Error("another process does not notice the pause")
	}
	if p, err := newStore(t, manager, "b", inboxpgx.Config{}).Paused(t.Context()); err != nil || p != (driver.Pause{}) {
		t.Errorf("another consumer: %+v, %v", p, err)
	}
}

func TestPauseInMemory(t *testing.T) {
	t.Parallel()
	s, _ := fakeStore(t)
	checkPause(t, s)
}

// checkPause pauses and resumes a Store while WatchPause runs.
func checkPause(t *testing.T, s *inboxpgx.Store) {
	t.Helper()
	told := make(chan driver.Pause, 10)
	ctx, stop := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	watching.Go(func() { s.WatchPause(ctx, func(p driver.Pause) { told <- p }) })
	defer watching.Wait()
	defer stop()
	wants := func(by, reason string) (since time.Time) {
		t.Helper()
		select {
		case p := <-told:
			kept, err := s.Paused(t.Context())
			if err != nil || p != kept || p.By != by || p.Reason != reason || p.Since.IsZero() != (by == "") {
				t.Errorf("told %+v, kept %+v, %v, want %q, %q", p, kept, err, by, reason)
			}
			return p.Since
		case <-time.After(testenv.Patience):
			t.Fatal("WatchPause reported nothing")
			return time.Time{}
		}
	}
	wants("", "")
	noError(t, s.Pause(t.Context(), "ada", "the bank is down"))
	since := wants("ada", "the bank is down")
	noError(t, s.Pause(t.Context(), "bob", ""))
	if again := wants("bob", ""); !again.Equal(since) {
		t.Errorf("it began at %v, and then at %v", since, again)
	}
	for range 2 {
		noError(t, s.Resume(t.Context()))
	}
	wants("", "")
	for _, wrong := range [][2]string{{"", "x"}, {"a\nb", "x"}, {"a", strings.Repeat("x", 1001)}} {
		if err := s.Pause(t.Context(), wrong[0], wrong[1]); err == nil {
			t.Errorf("paused by %q for %.10q", wrong[0], wrong[1])
		}
	}
	if p, err := s.Paused(t.Context()); err != nil || p != (driver.Pause{}) {
		t.Errorf("paused %+v, %v", p, err)
	}
}

func noError(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// parkAt parks a dead letter and a message behind it, as if the key had been stopped for some time.
func parkAt(t *testing.T, pool *pgxpool.Pool, consumer, key string, ago time.Duration) (deadLetter, behind uuid.UUID) {
	t.Helper()
	p := newStore(t, newManager(t, pool), consumer, inboxpgx.Config{}).Entries().Parking(consumer)
	m := event()
	m.Queue = "orders"
	dead := driver.NewDeadLetter(m, driver.Classify(errors.New("the password is secret")), consumer, time.Now())
	noError(t, p.Stop(t.Context(), key, dead))
	next := event()
	wait(t, p, key, next)
	exec(t, pool, `UPDATE holdfast_inbox_stopped SET since = since - $1::interval WHERE consumer = $2 AND key = $3`, ago, consumer, key)
	return m.ID, next.ID
}

// wait stores a message of a stopped key.
func wait(t *testing.T, p pgdriver.Parking, key string, m *inbox.Message) {
	t.Helper()
	if waits, err := p.Wait(t.Context(), key, m, false); !waits || err != nil {
		t.Fatalf("Wait: %v, error %v", waits, err)
	}
}

// Keys stopped for long are reported, of every consumer, with a bounded example.
func TestCheckFindsKeysStoppedForLong(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	parkAt(t, pool, "a", "recent", 23*time.Hour)
	store := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
	if err := store.Check(t.Context()); err != nil {
		t.Errorf("before the time: %v", err)
	}
	parkAt(t, pool, "a", "old", 25*time.Hour)
	parkAt(t, pool, "a", "oldest\x1b"+strings.Repeat("x", 100), 72*time.Hour)
	parkAt(t, pool, "it's", "other", 30*time.Hour)
	err := store.Check(t.Context())
	if err == nil {
		t.Fatal("nothing is found")
	}
	for _, want := range []string{
		`2 ordering keys of consumer "a" have been stopped for more than 24h0m0s; the longest is "oldest\x1b` + strings.Repeat("x", 57) + `", for 72h0m0s;`,
		`1 ordering keys of consumer "it's"`, `WHERE consumer = 'it''s'`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in %v", want, err)
		}
	}
	if strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "recent") {
		t.Errorf("the findings show too much: %v", err)
	}
	letters := driver.NewDeadLetters(store.Parked(), driver.DefaultRetention, slog.New(slog.DiscardHandler))
	if done, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); done.Returned != 3 || err != nil {
		t.Fatalf("%+v, error %v", done, err)
	}
	if err := store.Check(t.Context()); err == nil || strings.Contains(err.Error(), `consumer "a"`) {
		t.Errorf("after the replay: %v", err)
	}
}

// Parked messages are reported if no consumer of the Store parks any more.
func TestCheckFindsMessagesLeftParked(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	parkAt(t, pool, "a", "k", 0)
	parkAt(t, pool, "a", "l", 0)
	parkAt(t, pool, "b", "k", 0)
	parks := inbox.ConsumerConfig{Ordered: true, ParkKeys: true}
	for name, test := range map[string]struct {
		consumers []inbox.ConsumerConfig
		found     bool
	}{
		"no consumer":  {nil, false},
		"it parks":     {[]inbox.ConsumerConfig{parks}, false},
		"one parks":    {[]inbox.ConsumerConfig{{}, parks}, false},
		"it parks not": {[]inbox.ConsumerConfig{{Ordered: true}}, true},
	} {
		store := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
		for _, cfg := range test.consumers {
			store.Park(cfg)
		}
		err := store.Check(t.Context())
		if found := err != nil && strings.Contains(err.Error(), `4 messages of 2 ordering keys of consumer "a"`); found != test.found {
			t.Errorf("%s: %v", name, err)
		}
	}
	gone := newStore(t, newManager(t, pool), "c", inboxpgx.Config{})
	gone.Park(inbox.ConsumerConfig{})
	if err := gone.Check(t.Context()); err != nil {
		t.Errorf("a consumer without parked messages: %v", err)
	}
}

// A role that may not read the table gets no finding about its content.
func TestCheckWithoutTheRightToSeeParked(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	parkAt(t, pool, "a", "k", 48*time.Hour)
	clerk := pgx.Identifier{"clerk_" + strings.ReplaceAll(ids.New().String(), "-", "")}.Sanitize()
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(context.Background(), sql); err != nil {
			t.Error(err)
		}
	}
	exec(`CREATE ROLE ` + clerk)
	t.Cleanup(func() { exec(`DROP OWNED BY ` + clerk + `; DROP ROLE ` + clerk) })
	var schema string
	noError(t, pool.QueryRow(t.Context(), `SELECT quote_ident(current_schema())`).Scan(&schema))
	exec(`GRANT USAGE ON SCHEMA ` + schema + ` TO ` + clerk + `; GRANT INSERT ON holdfast_inbox TO ` + clerk)
	cfg := pool.Config()
	cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET ROLE `+clerk)
		return err
	}
	own, err := pgxpool.NewWithConfig(t.Context(), cfg)
	noError(t, err)
	defer own.Close()
	noError(t, newStore(t, newManager(t, own), "a", inboxpgx.Config{}).Check(t.Context()))
}

// The reply to a removal is lost, and the removal may have been done: no second dead letter is removed.
func TestRemovalOfParkedWithoutAnswer(t *testing.T) {
	t.Parallel()
	proxy := testenv.NewProxy(t, pgtest.URL(t))
	pool := pgtest.Pool(t, proxy.URL(), 1)
	createTables(t, pool)
	for _, key := range []string{"a", "b", "c"} {
		parkAt(t, pool, "a", key, 0)
	}
	letters := driver.NewDeadLetters(newStore(t, newManager(t, pool), "a", inboxpgx.Config{}).Parked(), driver.DefaultRetention, slog.New(slog.DiscardHandler))
	proxy.SilenceOn(testenv.Silence{On: "COMMIT", Answer: true})
	go func() {
		for t.Context().Err() == nil && proxy.Silenced() == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(100 * time.Millisecond)
		proxy.CutConnections()
	}()
	n, err := letters.Remove(t.Context(), inbox.Filter{Limit: 1}, inbox.Removal{By: "test", Reason: "test"})
	if n != 0 || err == nil {
		t.Errorf("%d removed, error %v", n, err)
	}
	testenv.Eventually(t, func() error { // the server may still be working on it
		if n, err := letters.Count(t.Context(), inbox.Filter{}); n != 2 || err != nil {
			return fmt.Errorf("%d are left, error %v", n, err)
		}
		return nil
	})
}

// The counts are restricted to one consumer, a time and a dead letter.
func TestCounts(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	ada, next := parkAt(t, pool, "a", "ada", time.Hour) // ConsumerConfig.Key may name a key that the message does not have
	bob, _ := parkAt(t, pool, "b", "bob", time.Hour)
	exec(t, pool, `INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
		SELECT c, gen_random_uuid(), now() - age FROM unnest(ARRAY['a', 'a', 'a', 'b'], ARRAY['1 s', '2 s', '1 hour', '1 s']::interval[]) AS m (c, age)`)
	s := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
	if n, err := s.Processed(t.Context(), time.Minute); n != 2 || err != nil {
		t.Errorf("%d processed in a minute, %v, want 2", n, err)
	}
	for id, want := range map[uuid.UUID]int{ada: 1, next: 0, bob: 0} {
		first, n, err := s.Behind(t.Context(), id)
		if n != want || len(first) != want || err != nil || want > 0 && (first[0].Message.ID != next || time.Since(first[0].ParkedAt) > time.Minute) {
			t.Errorf("%d behind the dead letter %s, %v, %v, want %d", n, id, first, err, want)
		}
	}
	for range 100 {
		wait(t, s.Entries().Parking("a"), "ada", event())
	}
	if first, n, err := s.Behind(t.Context(), ada); len(first) != 100 || n != 101 || err != nil {
		t.Errorf("%d of %d behind a dead letter, %v, want 100 of 101", len(first), n, err)
	}
	fake, _ := fakeStore(t)
	noError(t, inboxpgx.Handle(fake, conformance.Name, noEffect))
	noError(t, errors.Join(fake.Process(t.Context(), []*inbox.Message{event(), event()})...))
	if n, err := fake.Processed(t.Context(), time.Minute); n != 2 || err != nil {
		t.Errorf("in memory %d processed in a minute, %v, want 2", n, err)
	}
	if _, n, err := fake.Behind(t.Context(), ada); n != 0 || err != nil {
		t.Errorf("in memory %d behind a letter, %v", n, err)
	}
}

// Without Migrate, every call returns an error that names it.
func TestErrorsBeforeMigrateNameIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	for name, schema := range map[string]string{"no table": "", "no schema": "nowhere"} {
		p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{Schema: schema})
		ledger := p.Ledger()
		handle(t, p, noEffect)
		for call, do := range map[string]func(ctx context.Context) error{
			"process": func(context.Context) error {
				err := process(t, p, event())
				if !errors.Is(err, driver.ErrUnavailable) {
					t.Errorf("the message would count as failed: %v", err)
				}
				return err
			},
			"process several": func(ctx context.Context) error {
				return errors.Join(p.Process(ctx, []*inbox.Message{event(), event()})...)
			},
			"look":   func(ctx context.Context) error { _, err := ledger.Look(ctx, ids.New()); return err },
			"start":  func(ctx context.Context) error { return ledger.Start(ctx, event()) },
			"end":    func(ctx context.Context) error { return ledger.End(ctx, event()) },
			"pass":   func(ctx context.Context) error { return ledger.Pass(ctx, event(), time.Hour) },
			"forget": func(ctx context.Context) error { return ledger.Forget(ctx, ids.New()) },
			"prune": func(ctx context.Context) error {
				_, err := p.Prune(ctx)
				return err
			},
		} {
			err := do(t.Context())
			if err == nil || !strings.Contains(err.Error(), "call Store.Migrate of inboxpgx first") {
				t.Errorf("%s, %s: %v", name, call, err)
			}
			if _, ok := errors.AsType[*pgconn.PgError](err); !ok {
				t.Errorf("%s, %s: no PgError in %v", name, call, err)
			}
		}
	}
}

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

// The times of entries are rounded; no entry is pruned before its retention has passed.
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

// With an endless retention nothing is deleted.
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

// The index by time takes a few bytes per entry, because many entries have the same second.
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
			Fix() string
		}](err)
		if found == nil || found.Fix() == "" || strings.Count(err.Error(), "\n") != 0 || !strings.Contains(err.Error(), problem) {
			t.Errorf("Check: %v, want one finding with %q", err, problem)
		}
	}
	if err := p.Configured(); err == nil || !strings.Contains(err.Error(), "ByName names") {
		t.Errorf("a name without a handler: %v", err)
	}
	handle(t, p, noEffect)
	noError(t, p.Configured())
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
	want("of paused consumers does not exist")
	exec(t, pool, `ALTER TABLE away RENAME TO holdfast_inbox_pause`)
	exec(t, pool, `DROP TABLE holdfast_inbox_attempts`)
	want("of the ledger does not exist")
}

// parkCopy processes a message and parks a copy of it behind a dead letter. That happens if the connection is
// lost before both are acknowledged. It returns the message.
func parkCopy(t *testing.T, s *inboxpgx.Store) *inbox.Message {
	t.Helper()
	m, head := numbered(0), numbered(1)
	head.Queue = "orders"
	noError(t, process(t, s, m))
	dead := driver.NewDeadLetter(head, driver.Classify(inbox.Unrecoverable(errors.New("no"))), "a", time.Now())
	noError(t, s.Entries().Parking("a").Stop(t.Context(), "k", dead))
	wait(t, s.Entries().Parking("a"), "k", m)
	return m
}

// goOn removes the dead letter and waits until the copy behind it is done.
func goOn(t *testing.T, s *inboxpgx.Store) {
	t.Helper()
	s.Park(driver.ConsumerDefaults(inbox.ConsumerConfig{Ordered: true, ParkKeys: true}, "orders"))
	letters := driver.NewDeadLetters(s.Parked(), s.Retention(), slog.New(slog.DiscardHandler))
	if n, err := letters.Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "test", Reason: "test"}); n != 1 || err != nil {
		t.Fatalf("%d dead letters removed, error %v", n, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { s.Background(ctx) })
	testenv.Eventually(t, func() error {
		keys, messages, err := s.Entries().Parking("a").Count(t.Context(), 10)
		if err == nil && keys+messages > 0 {
			err = fmt.Errorf("%d keys, %d messages", keys, messages)
		}
		return err
	})
	cancel()
	running.Wait()
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

// The entry of a processed message with a copy that waits behind a dead letter is kept for as long as the
// copy waits.
func TestPruneKeepsWhatIsParked(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	s := effectStore(t, newManager(t, pool))
	m := parkCopy(t, s)
	other := newStore(t, newManager(t, pool), "b", inboxpgx.Config{})
	handle(t, other, noEffect)
	if err := process(t, other, m); err != nil { // no message waits there
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
	goOn(t, s)
	var effects int
	noError(t, pool.QueryRow(t.Context(), `SELECT count(*) FROM effects`).Scan(&effects))
	if effects != 2 {
		t.Errorf("%d effects of 2 messages", effects)
	}
	outlive()
	prune(t, s, 3) // with the entry of the removed dead letter
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
		if err := process(t, s, numbered(3)); err != nil { // a new entry removes the old ones
			t.Fatal(err)
		}
		if entries.Seen("a", old.ID) {
			t.Error("the entry without a waiting copy is still there")
		}
		goOn(t, s)
		if runs[0] != 1 {
			t.Errorf("%d runs of the message", runs[0])
		}
		time.Sleep(2 * time.Hour)
		noError(t, process(t, s, numbered(4)))
		if entries.Seen("a", m.ID) {
			t.Error("the entry stays for ever")
		}
	})
}

// parkEntries parks copies of some of the entries.
func parkEntries(t *testing.T, pool *pgxpool.Pool, which string) {
	t.Helper()
	exec(t, pool, `INSERT INTO holdfast_inbox_stopped (consumer, key) VALUES ('a', 'k')`)
	exec(t, pool, `INSERT INTO holdfast_inbox_waiting (consumer, key, message_id, envelope, body)
		SELECT consumer, 'k', message_id, '{}', '' FROM holdfast_inbox WHERE `+which)
}

// An administrator may partition the table. Then rows of two partitions can have the same tuple id. Only
// entries that are older than the retention and have no waiting copy are pruned.
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
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_inbox_waiting`).Scan(&parked); err != nil || parked == 0 {
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

// A running consumer prunes the entries of its store by itself, even if several processes do so, and stops
// with Run.
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
		if n := left(); n != 2+7 { // the new one, the entry of another consumer, and the younger half of the ledger
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
