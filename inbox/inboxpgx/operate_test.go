package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A pause is known to all Stores of its consumer, those of other processes included, and to no other consumer.
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

// checkPause pauses and resumes a Store that is watched.
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
			t.Fatal("nothing is told")
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

// parkAt parks a dead letter and a message behind it, stopped since a time.
func parkAt(t *testing.T, pool *pgxpool.Pool, consumer, key string, ago time.Duration) {
	t.Helper()
	p := newStore(t, newManager(t, pool), consumer, inboxpgx.Config{}).Parking(true)
	m := event()
	m.Queue = "orders"
	dead := driver.NewDeadLetter(m, driver.Classify(errors.New("the password is secret")), consumer, time.Now())
	noError(t, errors.Join(p.Stop(t.Context(), key, dead), p.Append(t.Context(), key, event())))
	exec(t, pool, `UPDATE holdfast_inbox_parked SET stopped_at = stopped_at - $1::interval WHERE message_id = $2`, ago, m.ID)
}

// Keys that were forgotten are found, of every consumer, with an example that is bounded.
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
	letters := driver.NewDeadLetters(store.Parking(true), driver.DefaultRetention, slog.New(slog.DiscardHandler))
	if done, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "test"}); done.Returned != 3 || err != nil {
		t.Fatalf("%+v, error %v", done, err)
	}
	if err := store.Check(t.Context()); err == nil || strings.Contains(err.Error(), `consumer "a"`) {
		t.Errorf("after the replay: %v", err)
	}
}

// Parked messages are found where no consumer of the Store parks any more.
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
			driver.ParkingOf(store, cfg)
		}
		err := store.Check(t.Context())
		if found := err != nil && strings.Contains(err.Error(), `4 messages of 2 ordering keys of consumer "a"`); found != test.found {
			t.Errorf("%s: %v", name, err)
		}
	}
	gone := newStore(t, newManager(t, pool), "c", inboxpgx.Config{})
	driver.ParkingOf(gone, inbox.ConsumerConfig{})
	if err := gone.Check(t.Context()); err != nil {
		t.Errorf("a consumer without parked messages: %v", err)
	}
}

// A role that may not read the table is told nothing of what is in it.
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

// The answer to a removal is lost, which may have been done: no further letter is removed in its place.
func TestRemovalOfParkedWithoutAnswer(t *testing.T) {
	t.Parallel()
	proxy := testenv.NewProxy(t, pgtest.URL(t))
	pool := pgtest.Pool(t, proxy.URL(), 1)
	createTables(t, pool)
	for _, key := range []string{"a", "b", "c"} {
		parkAt(t, pool, "a", key, 0)
	}
	letters := driver.NewDeadLetters(newStore(t, newManager(t, pool), "a", inboxpgx.Config{}).Parking(true), driver.DefaultRetention, slog.New(slog.DiscardHandler))
	proxy.SilenceOn(testenv.Silence{On: "DELETE 1", Answer: true})
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
	testenv.Eventually(t, func() error { // the server may be at it still
		if n, err := letters.Count(t.Context(), inbox.Filter{}); n != 2 || err != nil {
			return fmt.Errorf("%d are left, error %v", n, err)
		}
		return nil
	})
}

// The counts are those of one consumer, of a time and of a key.
func TestCounts(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	parkAt(t, pool, "a", "ada", time.Hour)
	parkAt(t, pool, "b", "bob", time.Hour)
	exec(t, pool, `INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
		SELECT c, gen_random_uuid(), now() - age FROM unnest(ARRAY['a', 'a', 'a', 'b'], ARRAY['1 s', '2 s', '1 hour', '1 s']::interval[]) AS m (c, age)`)
	s := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
	if n, err := s.Processed(t.Context(), time.Minute); n != 2 || err != nil {
		t.Errorf("%d processed in a minute, %v, want 2", n, err)
	}
	for key, want := range map[string]int{"ada": 1, "bob": 0} {
		if n, err := s.Behind(t.Context(), key); n != want || err != nil {
			t.Errorf("%d behind the letter of %s, %v, want %d", n, key, err, want)
		}
	}
	fake, _ := fakeStore(t)
	noError(t, inboxpgx.Handle(fake, conformance.Name, noEffect))
	noError(t, errors.Join(fake.Process(t.Context(), []*inbox.Message{event(), event()})...))
	if n, err := fake.Processed(t.Context(), time.Minute); n != 2 || err != nil {
		t.Errorf("in memory %d processed in a minute, %v, want 2", n, err)
	}
	if n, err := fake.Behind(t.Context(), "ada"); n != 0 || err != nil {
		t.Errorf("in memory %d behind a letter, %v", n, err)
	}
}

// Whoever forgets Migrate is told so by whatever is called first.
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
			"pass":   func(ctx context.Context) error { return ledger.Pass(ctx, event()) },
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
