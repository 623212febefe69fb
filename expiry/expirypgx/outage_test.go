package expirypgx_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// lines is a log that may be read while it is written.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// A disk that is full, and a database that is away, accuse no row, are a line of log
// now and then, and are over for all rows seconds after their end.
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
			if n := strings.Count(text, "\n"); n == 0 || strings.Contains(text, "at fault") || strings.Contains(text, "row fails") {
				t.Errorf("%d lines of log:\n%s", n, text)
			}
		})
	}
}

// A table or a column that does not exist is named, with what to do.
func TestMissingTableIsNamed(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	store := b.Store(t, nil)
	for _, sql := range []string{"ALTER TABLE holds RENAME expires_at TO until", "DROP TABLE holds"} {
		b.exec(t, sql)
		_, sweepErr := store.SweepBatch(t.Context(), driver.Request{Limit: 1})
		_, lookErr := store.Look(t.Context(), nil)
		for _, err := range []error{sweepErr, lookErr} {
			if err == nil || !strings.Contains(err.Error(), "table holds") || !strings.Contains(err.Error(), "correct Config") {
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
			return errors.New("the store does not say that the table does not exist: " + log.String())
		}
		return nil
	})
	b.exec(t, "CREATE TABLE holds ()") // for the notification to be sent, and its goroutine to end
}
