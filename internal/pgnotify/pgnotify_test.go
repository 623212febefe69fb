package pgnotify_test

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgnotify"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// heard runs a listener until the test ends, and returns the times it receives once it is connected. It does not test
// its connection again, because on a busy machine such a test could fail and lose notifications.
func heard(t *testing.T, c pgnotify.Channel) <-chan time.Time {
	t.Helper()
	times := make(chan time.Time, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	l := pgnotify.NewListener(pgnotify.ListenerConfig{
		Channel: c, ProbeInterval: time.Hour, Failed: func(_ context.Context, err error) { t.Log(err) },
		Wake: func(at time.Time) {
			if !at.IsZero() {
				times <- at
			}
		},
	})
	go func() { defer close(ended); l.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	testenv.Eventually(t, l.State)
	return times
}

func next(t *testing.T, times <-chan time.Time) time.Time {
	t.Helper()
	select {
	case at := <-times:
		return at
	case <-time.After(testenv.Patience):
		t.Fatal("nothing was heard")
		return time.Time{}
	}
}

func sender(t *testing.T, c pgnotify.Channel, keep time.Duration, failures *atomic.Int64) *pgnotify.Sender {
	t.Helper()
	return pgnotify.NewSender(pgnotify.SenderConfig{
		Channel: c, Interval: 50 * time.Millisecond, Keep: keep,
		Failed: func(context.Context, error) { failures.Add(1) },
	})
}

func table(t *testing.T) (pool *pgxpool.Pool, c pgnotify.Channel) {
	t.Helper()
	pool = pgtest.New(t)
	if _, err := pool.Exec(t.Context(), "CREATE TABLE rows ()"); err != nil {
		t.Fatal(err)
	}
	return pool, pgnotify.Channel{Pool: pool, Prefix: "sender_test_", Table: `"rows"`}
}

// Many times told together become one or two notifications, and the earliest time is among them.
func TestSenderGathers(t *testing.T) {
	t.Parallel()
	_, c := table(t)
	times := heard(t, c)
	var failures atomic.Int64
	s := sender(t, c, time.Minute, &failures)
	first := time.Now().Add(time.Minute).Truncate(time.Microsecond)
	for n := range 100 {
		s.Tell(first.Add(time.Duration(99-n) * time.Second))
	}
	n := 1
	for !next(t, times).Equal(first) {
		n++
	}
	if n > 20 {
		t.Errorf("100 times took %d notifications", n)
	}
	s.Tell(first) // its goroutine has ended, or is about to
	if at := next(t, times); !at.Equal(first) {
		t.Errorf("heard %v, want %v", at, first)
	}
}

// A failed notification is retried for Keep.
func TestSenderKeeps(t *testing.T) {
	t.Parallel()
	pool, c := table(t)
	times := heard(t, c)
	rename := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	rename("ALTER TABLE rows RENAME TO elsewhere")
	var failures atomic.Int64
	s := sender(t, c, time.Minute, &failures)
	want := time.Now().Add(time.Minute).Truncate(time.Microsecond)
	s.Tell(want)
	testenv.Eventually(t, func() error {
		if failures.Load() == 0 {
			return errors.New("no failure yet")
		}
		return nil
	})
	s.Tell(want.Add(time.Hour))
	rename("ALTER TABLE elsewhere RENAME TO rows")
	if at := next(t, times); !at.Equal(want) {
		t.Errorf("heard %v, want %v", at, want)
	}
}

// A closed pool ends the sender without a report.
func TestSenderOnAClosedPool(t *testing.T) {
	t.Parallel()
	pool, c := table(t)
	pool.Close()
	synctest.Test(t, func(t *testing.T) { // fails if the sender's goroutine stays
		var failures atomic.Int64
		sender(t, c, time.Hour, &failures).Tell(time.Now())
		time.Sleep(time.Minute)
		if failures.Load() > 0 {
			t.Error("the end of the pool was reported")
		}
	})
}

// Probe returns its answer although a busy server once takes seconds to open a connection.
func TestProbeOnBusyServer(t *testing.T) {
	t.Parallel()
	_, c := table(t)
	testenv.Eventually(t, func() error { return probeWithOneFailure(t, c) }) // the server may really be busy
}

// probeWithOneFailure probes, and the first try cannot open its second connection, which sends the notification.
func probeWithOneFailure(t *testing.T, c pgnotify.Channel) error {
	t.Helper()
	cfg := c.Pool.Config()
	var opened atomic.Int64
	cfg.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		if n := opened.Add(1); n == 2 {
			return context.DeadlineExceeded
		}
		return nil
	}
	busy, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	c.Pool = busy
	probed := pgnotify.NewListener(pgnotify.ListenerConfig{
		Channel: c, Wake: func(time.Time) {}, ProbeInterval: time.Minute, Failed: func(context.Context, error) {},
	})
	err = probed.Probe(t.Context())
	if n := opened.Load(); err == nil && n < 4 {
		t.Errorf("%d connections were asked for, so none failed", n)
	}
	return err
}
