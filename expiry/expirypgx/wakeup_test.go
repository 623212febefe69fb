package expirypgx_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

// elsewhere returns a store like one in another process.
func elsewhere(t *testing.T, b *backend) *expirypgx.Store {
	t.Helper()
	return (&backend{pool: pgtest.Pool(t, b.pool.Config().ConnString(), 2)}).store(t, expirypgx.Config{})
}

// listening waits until a sweeper receives notifications.
func listening(t *testing.T, b *backend) {
	t.Helper()
	eventually(t, func() error {
		var n int
		err := b.pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN \"holdfast_expiry_' || 'holds'::regclass::oid || '\"'").Scan(&n)
		if err == nil && n == 0 {
			err = errors.New("no session listens")
		}
		return err
	})
}

// A short hold made by another process expires, with the half-hour schedule and without a poll in between.
func TestDueWakesTheSweeperOfAnotherProcess(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.sweeper(t, expiry.SweeperConfig{})
	listening(t, b)
	other := elsewhere(t, b)
	for n := range 3 {
		hold(t, other, fmt.Sprint("later ", n), 15*time.Minute)
		hold(t, other, fmt.Sprint(n), 300*time.Millisecond)
	}
	b.latest(t, 3)
}

// Due returns false for a transaction without a manager; use Wake instead.
func TestWakeAfterARawTransaction(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.sweeper(t, expiry.SweeperConfig{})
	listening(t, b)
	other := elsewhere(t, b)
	tx, err := b.pool.Begin(t.Context())
	must(t, err)
	deadline, err := insertHold(t.Context(), tx, "row", 300*time.Millisecond)
	must(t, err)
	if other.Due(tx, deadline) {
		t.Error("Due accepted the transaction")
	}
	must(t, tx.Commit(t.Context()))
	other.Wake(deadline)
	b.latest(t, 1)
}

// woken returns a store whose wake-ups the test receives until it ends.
func woken(t *testing.T, b *backend, cfg expirypgx.Config) (*expirypgx.Store, <-chan time.Time) {
	t.Helper()
	times := make(chan time.Time, 100)
	store := b.store(t, cfg)
	background(t, func(ctx context.Context) error {
		store.Background(ctx, func(at time.Time) { times <- at })
		return nil
	})
	return store, times
}

// next waits for a wake-up at that time.
func next(t *testing.T, times <-chan time.Time, want time.Time) {
	t.Helper()
	eventually(t, func() error { return heard(times, want, nil) })
}

// hears waits for a wake-up at that time. other repeats it, because a listener that reconnects in the meantime misses
// one. It returns the other wake-ups received before.
func hears(t *testing.T, times <-chan time.Time, other *expirypgx.Store, want time.Time) (besides []time.Time) {
	t.Helper()
	eventually(t, func() error {
		other.Wake(want)
		return heard(times, want, &besides)
	})
	return besides
}

func heard(times <-chan time.Time, want time.Time, besides *[]time.Time) error {
	for {
		select {
		case at := <-times:
			if at.Equal(want) {
				return nil
			}
			if besides != nil {
				*besides = append(*besides, at)
			}
		default:
			return fmt.Errorf("not woken for %v", want)
		}
	}
}

// After an outage of the listening connection a wake-up with an unknown time comes first, and then the wake-ups of
// other processes.
func TestListeningOutlivesAnOutage(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "waits for a broken connection to be noticed")
	b := newBackend(t)
	proxy := testenv.NewProxy(t, b.pool.Config().ConnString())
	store, times := woken(t, &backend{pool: pgtest.Pool(t, proxy.URL(), 3)}, expirypgx.Config{})
	other := elsewhere(t, b)
	want := time.Now().Truncate(time.Microsecond)
	for _, outage := range []func(){proxy.Cut, proxy.Pause} {
		eventually(t, func() error { return expirypgx.Listening(store) }) // it receives notifications before its first test ends
		outage()
		eventually(t, func() error {
			if expirypgx.Listening(store) == nil {
				return errors.New("it has not noticed the outage")
			}
			return nil
		})
		for len(times) > 0 {
			<-times
		}
		proxy.Heal()
		next(t, times, time.Time{})
		want = want.Add(time.Minute)
		hears(t, times, other, want)
	}
	if err := checked(t, store); err != nil {
		t.Errorf("Check found %v", err)
	}
}

// Of two sweepers on one store one listens for both, and the other takes over from it.
func TestListeningIsTakenOver(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	store := b.store(t, expirypgx.Config{})
	var heard [2]chan time.Time
	var stop [2]func()
	for i := range heard {
		heard[i] = make(chan time.Time, 100)
		stop[i] = background(t, func(ctx context.Context) error {
			store.Background(ctx, func(at time.Time) { heard[i] <- at })
			return nil
		})
		next(t, heard[i], time.Time{}) // for earlier rows, even while the other one listens
		eventually(t, func() error { return expirypgx.Listening(store) })
	}
	other := elsewhere(t, b)
	want := time.Now().Add(time.Minute).Truncate(time.Microsecond)
	hears(t, heard[1], other, want)
	next(t, heard[0], want)
	stop[0]()
	hears(t, heard[1], other, want.Add(time.Minute))
}

// A deadline that every sweeper finds in time by polling is not announced to others. An unknown deadline is
// announced.
func TestFarDeadlinesAreNotAnnounced(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	store, times := woken(t, b, expirypgx.Config{})
	eventually(t, func() error { return expirypgx.Listening(store) })
	other := elsewhere(t, b)
	near := time.Now().Add(12 * time.Minute).Truncate(time.Microsecond)
	far := near.Add(2 * time.Minute)
	other.Wake(far)
	for _, at := range hears(t, times, other, near) {
		if at.Equal(far) {
			t.Errorf("woken for %v", at)
		}
	}
	eventually(t, func() error { return expirypgx.Listening(store) })
	for len(times) > 0 {
		<-times
	}
	hears(t, times, other, time.Time{})
}

// With PollOnly no session listens and nothing is sent, but sweepers on the same store are still woken.
func TestPollOnly(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	listener, others := woken(t, b, expirypgx.Config{})
	eventually(t, func() error { return expirypgx.Listening(listener) })
	store, times := woken(t, b, expirypgx.Config{PollOnly: true})
	next(t, times, time.Time{}) // for earlier rows
	want := time.Now().Add(time.Minute).Truncate(time.Microsecond)
	store.Wake(want)
	next(t, times, want)
	last := want.Add(time.Hour)
	for _, at := range hears(t, others, elsewhere(t, b), want.Add(time.Minute)) {
		if !at.IsZero() { // it has reconnected
			t.Errorf("another process received %v", at)
		}
	}
	if err := checked(t, store); err != nil {
		t.Errorf("Check found %v", err)
	}
	store.Wake(last)
	next(t, times, last)
}

// skewed returns a backend whose database clock differs from this host's clock: functions in its schema replace those
// of Postgres.
func skewed(t *testing.T, ahead time.Duration) *backend {
	t.Helper()
	u, err := url.Parse(pgtest.URL(t))
	must(t, err)
	query := u.Query()
	query.Set("search_path", query.Get("search_path")+",pg_catalog")
	u.RawQuery = query.Encode()
	b := &backend{pool: pgtest.Pool(t, u.String(), 10)}
	for _, f := range []string{"now", "clock_timestamp"} {
		b.exec(t, fmt.Sprintf(`CREATE FUNCTION %s() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT pg_catalog.%s() + interval ''%d s'''`,
			f, f, int(ahead.Seconds())))
	}
	b.exec(t, schema)
	return b
}

// A clock difference of five minutes in either direction changes nothing. The database's clock decides, also for the
// wake-up of another process.
func TestClockSkew(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{5 * time.Minute, -5 * time.Minute} {
		t.Run(ahead.String(), func(t *testing.T) {
			t.Parallel()
			b := skewed(t, ahead)
			o, err := b.store(t, expirypgx.Config{}).Look(t.Context(), nil)
			if off := time.Until(o.Now) - ahead; err != nil || off.Abs() > time.Minute {
				t.Fatalf("the database's clock is not skewed: %v, %v", off, err)
			}
			store, _ := b.sweeper(t, expiry.SweeperConfig{})
			listening(t, b)
			hold(t, store, "woken", time.Second)
			hold(t, elsewhere(t, b), "notified", time.Second)
			hold(t, store, "later", 10*time.Minute)
			if late := b.latest(t, 2); late < 0 {
				t.Errorf("expired %v before the deadline by the database's clock", -late)
			}
			if got := b.State(t, "later"); got != "held" {
				t.Errorf("the row that has ten minutes is %s", got)
			}
		})
	}
}

// statements counts the statements of a pool.
type statements struct{ n atomic.Int64 }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if !strings.HasPrefix(q.SQL, "-- ping") {
		s.n.Add(1)
	}
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A Look is one statement, and a sweep without due rows is begin, claim and commit.
// TestIdleCostsAtMostOneQueryAMinute of expiry counts both for an idle sweeper.
func TestIdleStatements(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	b.Put(t, "later", "held", time.Hour)
	cfg := b.pool.Config()
	var sent statements
	cfg.ConnConfig.Tracer = &sent
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	store := (&backend{pool: pool}).store(t, expirypgx.Config{PollOnly: true})
	_, err = store.Look(t.Context(), nil)
	must(t, err)
	if n := sent.n.Swap(0); n != 1 {
		t.Errorf("a Look is %d statements", n)
	}
	batch, err := store.SweepBatch(t.Context(), driver.Request{Limit: 10})
	if n := sent.n.Load(); err != nil || batch.Claimed > 0 || n < 1 || n > 3 {
		t.Errorf("a batch with nothing due is %d statements: %+v, %v", n, batch, err)
	}
}
