package expirypgx_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
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
			var batches atomic.Int64
			sw, err := expiry.NewSweeper(far.Store(t, announceAll(far)), expiry.SweeperConfig{
				BatchSize: 20, Logger: slog.New(slog.NewTextHandler(log, nil)),
				Hooks: expiry.Hooks{
					OnPoison: func(_ context.Context, id string, err error) { t.Errorf("row %s is accused: %v", id, err) },
					OnSweep:  func(context.Context, expiry.Report, error) { batches.Add(1) },
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			stop := background(t, sw.Run)
			eventually(t, func() error { return sw.Ready(t.Context()) })
			end := outage(t, b, proxy)
			b.fill(t, 100)
			sw.Wake(time.Time{})
			before, start := batches.Load(), time.Now()
			eventually(t, func() error {
				if err := sw.Ready(t.Context()); err == nil {
					return errors.New("ready during the outage")
				}
				return nil
			})
			if err := runloop.Sleep(t.Context(), 8*time.Second); err != nil { // for its pauses to grow
				t.Fatal(err)
			}
			if n, most := batches.Load()-before, int64(6+time.Since(start)/time.Second); n > most {
				t.Errorf("%d sweeps in %v of outage", n, time.Since(start))
			}
			end()
			start = time.Now()
			testenv.Eventually(t, time.Minute, func() error { return b.heldAtMost(t, 0) })
			took := time.Since(start)
			t.Logf("all expired %v after the end", took.Round(10*time.Millisecond))
			if took > soonBack+busy {
				t.Errorf("it took %v", took)
			}
			stop()
			text := log.String()
			if n := strings.Count(text, "\n"); n == 0 || n > 2+int(time.Since(start)+20*time.Second)/int(10*time.Second) || strings.Contains(text, "at fault") {
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
	n, err := expirypgx.NewNotifier(b.pool, expirypgx.NotifierConfig{Table: "holds", Logger: slog.New(slog.NewTextHandler(log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	background(t, n.Run)
	n.Notify(time.Time{})
	eventually(t, func() error {
		if !strings.Contains(log.String(), "the table does not exist") {
			return errors.New("the notifier does not say that the table does not exist: " + log.String())
		}
		return nil
	})
}

// Listener and Notifier work where their context cannot be cancelled. Only their
// goroutine can end them then.
func TestRunOnBackground(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	woken := make(chan time.Time, 10)
	var leave atomic.Bool
	l, err := expirypgx.NewListener(b.pool, func(at time.Time) {
		if leave.Load() {
			runtime.Goexit()
		}
		woken <- at
	}, expirypgx.ListenerConfig{Table: "holds"})
	if err != nil {
		t.Fatal(err)
	}
	n, err := expirypgx.NewNotifier(b.pool, expirypgx.NotifierConfig{Table: "holds", Logger: slog.New(leaving{slog.DiscardHandler})})
	if err != nil {
		t.Fatal(err)
	}
	start := func(run func(context.Context) error) (gone chan struct{}) {
		gone = make(chan struct{})
		go func() {
			defer close(gone)
			t.Errorf("Run has returned %v", run(context.Background()))
		}()
		return gone
	}
	wait := func(gone chan struct{}) {
		t.Helper()
		eventually(t, func() error {
			select {
			case <-gone:
				return nil
			default:
				return errors.New("its goroutine goes on")
			}
		})
	}
	listening, notifying := start(l.Run), start(n.Run)
	want := time.Now().Add(time.Hour)
	<-woken // it listens
	n.Notify(want)
	if at := <-woken; !at.Equal(want) {
		t.Errorf("woken for %v, want %v", at, want)
	}
	leave.Store(true)
	n.Notify(want)
	wait(listening)
	b.exec(t, "DROP TABLE holds")
	n.Notify(want)
	wait(notifying)
}

// leaving ends the goroutine that logs.
type leaving struct{ slog.Handler }

func (leaving) Enabled(context.Context, slog.Level) bool { runtime.Goexit(); return false }
