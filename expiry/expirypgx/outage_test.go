package expirypgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// A full disk and a lost database put no row in quarantine, cost few log lines, and all rows expire seconds after
// their end.
func TestOutages(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "outages of seconds")
	for name, outage := range map[string]func(t *testing.T, b *backend, proxy *testenv.Proxy) (end func()){
		"disk full": func(t *testing.T, b *backend, _ *testenv.Proxy) func() {
			b.exec(t, `CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'No space left on device' USING ERRCODE = '53100'; END $$;
				CREATE TRIGGER full_disk BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION full_disk()`)
			return func() { b.exec(t, "DROP TRIGGER full_disk ON events") }
		},
		"away":   func(_ *testing.T, _ *backend, proxy *testenv.Proxy) func() { proxy.Cut(); return proxy.Heal },
		"silent": func(_ *testing.T, _ *backend, proxy *testenv.Proxy) func() { proxy.Pause(); return proxy.Resume },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, far, proxy := cutOff(t)
			log := &lines{}
			store := far.store(t, expirypgx.Config{Emit: announceAll(far)})
			sw := newSweeper(t, store, expiry.SweeperConfig{
				BatchSize: 20, Logger: slog.New(slog.NewTextHandler(log, nil)),
			})
			stop := background(t, sw.Run)
			eventually(t, func() error { return sw.Ready(t.Context()) })
			end := outage(t, b, proxy)
			b.fill(t, 100)
			store.Wake(time.Time{})
			eventually(t, func() error {
				if err := sw.Ready(t.Context()); err == nil {
					return errors.New("ready during the outage")
				}
				return nil
			})
			end()
			start := time.Now()
			testenv.Eventually(t, func() error { return b.heldAtMost(t, 0) })
			took := time.Since(start)
			t.Logf("all expired %v after the end", took.Round(10*time.Millisecond))
			if took > soonBack {
				t.Errorf("it took %v", took)
			}
			stop()
			text := log.String()
			if n := strings.Count(text, "\n"); n == 0 || strings.Contains(text, "at fault") || strings.Contains(text, "row failed") {
				t.Errorf("%d lines of log:\n%s", n, text)
			}
		})
	}
}

// The error names a missing table or column, and the fix.
func TestMissingTableIsNamed(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	store := b.Store(t, nil)
	for _, sql := range []string{"ALTER TABLE holds RENAME expires_at TO until", "DROP TABLE holds"} {
		b.exec(t, sql)
		_, sweepErr := store.SweepBatch(t.Context(), driver.Request{Limit: 1})
		_, lookErr := store.Look(t.Context(), nil)
		for _, err := range []error{sweepErr, lookErr} {
			if err == nil || !strings.Contains(err.Error(), "table holds") || !strings.Contains(err.Error(), "fix Config") {
				t.Errorf("after %s: %v", sql, err)
			}
		}
	}
	log := &lines{}
	manager, err := txretry.New(b.pool, txretry.Config{})
	must(t, err)
	loud, err := expirypgx.New(manager, "holds", expirypgx.Config{Logger: slog.New(slog.NewTextHandler(log, nil))})
	must(t, err)
	loud.Wake(time.Time{})
	eventually(t, func() error {
		if !strings.Contains(log.String(), "the table does not exist") {
			return errors.New("the log does not report the missing table: " + log.String())
		}
		return nil
	})
	b.exec(t, "CREATE TABLE holds ()") // lets the notification be sent, and its goroutine end
}

const (
	// soonBack is the largest allowed time from a fault's end until due rows expire again.
	soonBack = 10 * time.Second
)

// cutOff returns a sweeper's backend whose pool goes through a proxy, with statements in plain text. b.pool connects
// directly.
func cutOff(t *testing.T) (b *backend, far *backend, proxy *testenv.Proxy) {
	t.Helper()
	b = newBackend(t)
	proxy = testenv.NewProxy(t, b.pool.Config().ConnString())
	far = &backend{pool: pgtest.Pool(t, proxy.URL()+"&default_query_exec_mode=exec", 4), silent: true}
	return b, far, proxy
}

// onSilent runs a test in a bubble: b always reaches the real server, far uses connections that fall silent. The
// clock stands still while the server works.
func onSilent(t *testing.T, test func(t *testing.T, s *silent.Postgres, b, far *backend)) {
	t.Helper()
	url := pgtest.URL(t) + "&default_query_exec_mode=exec"
	silent.Today(t, func(t *testing.T) {
		s := silent.NewPostgres(t, url)
		b := backendOn(t, silent.NewPostgres(t, url).Pool(t, 10))
		test(t, s, b, &backend{pool: s.Pool(t, 4), silent: true})
	})
}

// wantBack waits until a row has expired, once, and fails the test if that takes longer than soonBack. Times are
// virtual.
func (b *backend) wantBack(t *testing.T, id string) {
	t.Helper()
	start := time.Now()
	testenv.Eventually(t, func() error {
		if got := b.State(t, id); got != "expired" {
			return fmt.Errorf("row %s is %s", id, got)
		}
		return nil
	})
	if took := time.Since(start); took > soonBack {
		t.Errorf("row %s took %v", id, took)
	}
	if n := b.Announced(t, id); n != 1 {
		t.Errorf("row %s was announced %d times", id, n)
	}
}

// A connection that falls silent at any point of a sweep or a Look delays a row by seconds, and puts none in
// quarantine.
func TestSilentAtEachPoint(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before the subtests start
	for name, on := range map[string]string{
		"begin": "begin", "claim": "FOR UPDATE SKIP LOCKED", "change": "UPDATE", "announce": "INSERT INTO events", "commit": "commit",
		"look": "clock_timestamp()",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onSilent(t, func(t *testing.T, s *silent.Postgres, b, far *backend) {
				log := &lines{}
				store, sw := far.sweeper(t, expiry.SweeperConfig{Logger: slog.New(slog.NewTextHandler(log, nil))})
				for _, deliver := range []bool{false, true} {
					before, id := s.Silenced(), fmt.Sprint("delivered ", deliver)
					s.SilenceOn(testenv.Silence{On: on, Deliver: deliver})
					b.Put(t, id, "held", 0)
					store.Wake(time.Time{})
					b.wantBack(t, id)
					if strings.Contains(log.String(), "row failed") {
						t.Errorf("%s: the row is in quarantine:\n%s", id, log)
					}
					eventually(t, func() error {
						if s.Silenced() == before {
							return errors.New("no connection fell silent")
						}
						return sw.Ready(t.Context())
					})
				}
			})
		})
	}
}

// All connections of the sweeper and of its listener fall silent. Rows made by others still expire, and wake-ups
// arrive again.
func TestAllConnectionsSilent(t *testing.T) {
	t.Parallel()
	onSilent(t, func(t *testing.T, s *silent.Postgres, b, far *backend) {
		far.sweeper(t, expiry.SweeperConfig{})
		listening(t, b)
		other := b.store(t, expirypgx.Config{})
		s.SilenceConnections()
		for _, id := range []string{"during", "afterwards"} {
			hold(t, other, id, 0)
			b.wantBack(t, id)
		}
	})
}

// A server that no longer answers does not delay the shutdown.
func TestEndWhileTheServerIsSilent(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before the subtests start
	for _, on := range []string{"UPDATE", "commit", "clock_timestamp()"} {
		t.Run(on, func(t *testing.T) {
			t.Parallel()
			onSilent(t, func(t *testing.T, s *silent.Postgres, b, far *backend) {
				store := far.store(t, expirypgx.Config{Emit: announceAll(far)})
				sw, err := expiry.NewSweeper(store, expiry.SweeperConfig{Logger: slog.New(slog.DiscardHandler)})
				if err != nil {
					t.Fatal(err)
				}
				stop := background(t, sw.Run)
				eventually(t, func() error { return sw.Ready(t.Context()) })
				listening(t, b)
				s.SilenceOn(testenv.Silence{On: on, Connections: 100})
				b.Put(t, "row", "held", 0)
				store.Wake(time.Time{})
				eventually(t, func() error {
					if s.Silenced() == 0 {
						return errors.New("no connection is silent yet")
					}
					return nil
				})
				start := time.Now()
				stop()
				if took := time.Since(start); took > 10*time.Second { // the default of ShutdownTimeout
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

// lock locks rows in a transaction that stays open until the test ends.
func (b *backend) lock(t *testing.T, sql string) {
	t.Helper()
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tx.Rollback(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	if _, err := tx.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

// hanging makes row 0 hang on the server. (For a callback that hangs see TestHangingRowStopsTheOthersOnlyBriefly of
// expiry.)
var hanging = map[string]func(t *testing.T, b *backend) expirypgx.Config{
	"row locked by another": func(t *testing.T, b *backend) expirypgx.Config {
		b.lock(t, "SELECT FROM holds WHERE id = '0' FOR UPDATE")
		return expirypgx.Config{Emit: announceAll(b)}
	},
	"trigger that sleeps": func(t *testing.T, b *backend) expirypgx.Config {
		b.exec(t, fmt.Sprintf(trigger, "PERFORM pg_sleep(600)"))
		return expirypgx.Config{Emit: announceAll(b)}
	},
	"trigger that waits for a lock": func(t *testing.T, b *backend) expirypgx.Config {
		b.exec(t, "CREATE TABLE seats AS SELECT 1 AS n; "+fmt.Sprintf(trigger, "UPDATE seats SET n = 2"))
		b.lock(t, "SELECT FROM seats FOR UPDATE")
		return expirypgx.Config{Emit: announceAll(b)}
	},
}

// One row that hangs, for whatever reason, delays others only briefly. Rows of other batches, and rows that fall due,
// wait for at most one timeout. Rows of its own batch wait until it is found. If the server works in the meantime,
// the time is real.
func TestHangingRow(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before the subtests start
	for name, prepare := range hanging {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if strings.HasPrefix(name, "trigger") {
				testenv.Nightly(t, "it waits for a minute and asserts how long the others wait")
				testHangingRow(t, newBackend(t), prepare)
				return
			}
			onSilent(t, func(t *testing.T, _ *silent.Postgres, b, _ *backend) { testHangingRow(t, b, prepare) })
		})
	}
}

func testHangingRow(t *testing.T, b *backend, prepare func(*testing.T, *backend) expirypgx.Config) {
	t.Helper()
	const batchSize, due = 50, 300
	const timeout = 7 * time.Second // txretry gives up a server that is silent for 9 s
	b.fill(t, due)
	store := b.store(t, prepare(t, b))
	cfg := quiet()
	cfg.BatchSize, cfg.BatchTimeout = batchSize, timeout
	sw, err := expiry.NewSweeper(store, cfg)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	background(t, sw.Run)
	eventually(t, func() error { return b.heldAtMost(t, batchSize) })
	if took := time.Since(start); took > 2*timeout {
		t.Errorf("the rows of other batches took %v", took)
	}
	for n := range 10 { // they fall due during the search
		made, id := time.Now(), fmt.Sprint("new ", n)
		hold(t, store, id, 0)
		eventually(t, func() error {
			if b.State(t, id) != "expired" {
				return errors.New("a row that fell due in the meantime has not expired")
			}
			return nil
		})
		if took := time.Since(made); took > 2*timeout {
			t.Errorf("a row that fell due in the meantime expired %v late", took)
		}
	}
	eventually(t, func() error { return b.heldAtMost(t, 1) })
	if took := time.Since(start); took > 10*timeout { // 6 halvings, and their pauses
		t.Errorf("the rows of its own batch took %v", took)
	}
	if got := b.State(t, "0"); got != "held" {
		t.Errorf("the row that hangs is %s", got)
	}
}
