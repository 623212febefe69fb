package expirypgx_test

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
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// background runs fn until the test ends, or stop is called.
func background(t *testing.T, fn func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- fn(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// sweeper runs one on all rows of b until the test ends.
func (b *backend) sweeper(t *testing.T, cfg expiry.SweeperConfig) *expiry.Sweeper {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	sw, err := expiry.NewSweeper(b.Store(t, announceAll(b)), cfg)
	if err != nil {
		t.Fatal(err)
	}
	background(t, sw.Run)
	eventually(t, func() error { return sw.Ready(t.Context()) })
	return sw
}

// latest waits until so many rows have expired, and returns by how much the worst
// was late.
// onTime is how late a row may expire. A calm machine needs a tenth of it, and a
// sweeper that was not woken up would be late by more.
const onTime = 10 * time.Second

func (b *backend) latest(t *testing.T, n int) (late time.Duration) {
	t.Helper()
	eventually(t, func() error {
		var events int
		var seconds float64
		err := b.pool.QueryRow(t.Context(), `SELECT count(*), coalesce(extract(epoch FROM max(at - expires_at)), 0)::float8
			FROM events JOIN holds ON holds.id = hold_id`).Scan(&events, &seconds)
		if err == nil && events < n {
			err = fmt.Errorf("%d of %d rows have expired", events, n)
		}
		late = time.Duration(seconds * float64(time.Second))
		return err
	})
	return late
}

func listener(t *testing.T, pool *pgxpool.Pool, wake func(time.Time), cfg expirypgx.ListenerConfig) *expirypgx.Listener {
	t.Helper()
	cfg.Table, cfg.Logger = "holds", slog.New(slog.DiscardHandler)
	l, err := expirypgx.NewListener(pool, wake, cfg)
	if err != nil {
		t.Fatal(err)
	}
	background(t, l.Run)
	eventually(t, func() error { return l.Ready(t.Context()) })
	return l
}

func notifier(t *testing.T, pool *pgxpool.Pool) *expirypgx.Notifier {
	t.Helper()
	n, err := expirypgx.NewNotifier(pool, expirypgx.NotifierConfig{Table: "holds", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	background(t, n.Run)
	return n
}

// hold makes a row in a transaction of its own, and calls after with the deadline
// behind the commit.
func hold(t *testing.T, pool *pgxpool.Pool, id string, in time.Duration, after func(deadline time.Time)) {
	t.Helper()
	manager, err := txretry.New(pool, txretry.Config{})
	if err != nil {
		t.Fatal(err)
	}
	err = manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		var deadline time.Time
		err := tx.QueryRow(ctx, "INSERT INTO holds (id, status, expires_at) VALUES ($1, 'held', clock_timestamp() + $2) RETURNING expires_at", id, in).Scan(&deadline)
		txretry.AfterCommit(tx, func() { after(deadline) })
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A hold of two seconds that another process makes expires at its deadline, with
// the half-hour schedule and without a look in between.
func TestNotifierWakesTheSweeperOfAnotherProcess(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	sw := b.sweeper(t, expiry.SweeperConfig{Recheck: time.Hour})
	listener(t, b.pool, sw.Wake, expirypgx.ListenerConfig{})
	elsewhere := notifier(t, pgtest.Pool(t, b.pool.Config().ConnString(), 2))
	for n := range 3 {
		hold(t, b.pool, fmt.Sprint("later ", n), 15*time.Minute, elsewhere.Notify)
		hold(t, b.pool, fmt.Sprint(n), 2*time.Second, elsewhere.Notify)
	}
	if late := b.latest(t, 3); late > onTime {
		t.Errorf("expired %v late", late)
	}
}

// Without a wake-up such a hold is found when the sweeper looks again.
func TestHoldsMadeElsewhereAreFoundAtTheNextLook(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.sweeper(t, expiry.SweeperConfig{Recheck: 15 * time.Second})
	for n := range 3 {
		hold(t, b.pool, fmt.Sprint(n), 16*time.Second, func(time.Time) {})
	}
	if late := b.latest(t, 3); late > onTime {
		t.Errorf("expired %v late", late)
	}
}

func TestListenerReconnects(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	proxy := testenv.NewProxy(t, b.pool.Config().ConnString())
	woken := make(chan time.Time, 100)
	l := listener(t, pgtest.Pool(t, proxy.URL(), 3), func(at time.Time) { woken <- at }, expirypgx.ListenerConfig{ProbeInterval: 100 * time.Millisecond})
	if at := <-woken; !at.IsZero() {
		t.Errorf("a new connection says %v, want a look", at)
	}
	n := notifier(t, b.pool)
	for _, outage := range []func(){proxy.Cut, proxy.Pause} {
		outage()
		eventually(t, func() error {
			if l.Ready(t.Context()) == nil {
				return errors.New("it has not noticed the outage")
			}
			return nil
		})
		proxy.Heal()
		eventually(t, func() error { return l.Ready(t.Context()) })
		want := time.Now().Add(time.Minute)
		n.Notify(want.Add(time.Minute))
		n.Notify(want)
		eventually(t, func() error {
			for {
				select {
				case at := <-woken:
					if at.Equal(want) {
						return nil
					}
				default:
					return errors.New("not woken up")
				}
			}
		})
	}
	if found, err := l.Check(t.Context()); err != nil || len(found) > 0 {
		t.Errorf("Check found %v, %v", found, err)
	}
}

func TestNotifierAndListenerReportEveryViolation(t *testing.T) {
	t.Parallel()
	_, notifierErr := expirypgx.NewNotifier(nil, expirypgx.NotifierConfig{Table: "a;b", Interval: -1})
	_, listenerErr := expirypgx.NewListener(nil, nil, expirypgx.ListenerConfig{Schema: "a.b", Table: "holds", ProbeInterval: -1})
	for want, err := range map[string]error{
		"pool": notifierErr, "a;b": notifierErr, "Interval": notifierErr, "wake": listenerErr, "a.b": listenerErr, "ProbeInterval": listenerErr,
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
}
