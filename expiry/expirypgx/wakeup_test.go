package expirypgx_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

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
func (b *backend) sweeper(t *testing.T, cfg expiry.SweeperConfig) (*expirypgx.Store, *expiry.Sweeper) {
	t.Helper()
	store := b.store(t, expirypgx.Config{Emit: announceAll(b), Isolation: b.isolation})
	sw := newSweeper(t, store, cfg)
	background(t, sw.Run)
	eventually(t, func() error { return sw.Ready(t.Context()) })
	return store, sw
}

// onTime is how late a row may expire. A calm machine needs a tenth of it, and a
// sweeper that was not woken up would be late by more.
const onTime = 10 * time.Second

// latest waits until so many rows have expired, and returns by how much the worst
// was late.
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

// hold makes a row in a transaction of its own, of which the store knows.
func hold(t *testing.T, store *expirypgx.Store, id string, in time.Duration) {
	t.Helper()
	manager, err := txretry.New(expirypgx.PoolOf(store), txretry.Config{})
	must(t, err)
	err = manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		deadline, err := insertHold(ctx, tx, id, in)
		if err == nil && !store.Due(tx, deadline) {
			err = errors.New("Due does not know the transaction")
		}
		return err
	})
	must(t, err)
}

func insertHold(ctx context.Context, tx pgx.Tx, id string, in time.Duration) (deadline time.Time, err error) {
	err = tx.QueryRow(ctx, "INSERT INTO holds (id, status, expires_at) VALUES ($1, 'held', clock_timestamp() + $2) RETURNING expires_at", id, in).Scan(&deadline)
	return deadline, err
}

// elsewhere is a store as another process has it.
func elsewhere(t *testing.T, b *backend) *expirypgx.Store {
	t.Helper()
	return (&backend{pool: pgtest.Pool(t, b.pool.Config().ConnString(), 2)}).store(t, expirypgx.Config{})
}

// listening waits until the sweeper of a store hears of what others do.
func listening(t *testing.T, b *backend) {
	t.Helper()
	eventually(t, func() error {
		var n int
		err := b.pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN \"holdfast_expiry_' || 'holds'::regclass::oid || '\"'").Scan(&n)
		if err == nil && n == 0 {
			err = errors.New("nobody listens")
		}
		return err
	})
}

// A short hold that another process makes expires, with the half-hour schedule and without a look in between.
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

// A transaction that is no manager's is not known to Due, and Wake does instead.
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
		t.Error("Due knows the transaction")
	}
	must(t, tx.Commit(t.Context()))
	other.Wake(deadline)
	b.latest(t, 1)
}

// woken is a store whose wake-ups a test receives, until it ends.
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

// next waits for a wake-up of that time.
func next(t *testing.T, times <-chan time.Time, want time.Time) {
	t.Helper()
	eventually(t, func() error { return heard(times, want, nil) })
}

// hears wants a wake-up of that time, which other sends again until it is heard: a listener that
// connects anew meanwhile misses one. It returns what else was heard before.
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

// After an outage of the connection that listens there is an unknown time, and then
// what others send.
func TestListeningOutlivesAnOutage(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "waits for a broken connection to be noticed")
	b := newBackend(t)
	proxy := testenv.NewProxy(t, b.pool.Config().ConnString())
	store, times := woken(t, &backend{pool: pgtest.Pool(t, proxy.URL(), 3)}, expirypgx.Config{})
	other := elsewhere(t, b)
	want := time.Now().Truncate(time.Microsecond)
	for _, outage := range []func(){proxy.Cut, proxy.Pause} {
		eventually(t, func() error { return expirypgx.Listening(store) }) // it hears before its first test is over
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

// Of two sweepers on one store one listens for both, and the other takes over.
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
		next(t, heard[i], time.Time{}) // for rows before, also while the other one listens
		eventually(t, func() error { return expirypgx.Listening(store) })
	}
	other := elsewhere(t, b)
	want := time.Now().Add(time.Minute).Truncate(time.Microsecond)
	hears(t, heard[1], other, want)
	next(t, heard[0], want)
	stop[0]()
	hears(t, heard[1], other, want.Add(time.Minute))
}

// A deadline that every sweeper finds in time by itself is not announced to others, an
// unknown one is.
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
			t.Errorf("heard %v", at)
		}
	}
	eventually(t, func() error { return expirypgx.Listening(store) })
	for len(times) > 0 {
		<-times
	}
	hears(t, times, other, time.Time{})
}

// With PollOnly nobody listens, nothing is sent, and sweepers of the same store know
// all the same.
func TestPollOnly(t *testing.T) {
	t.Parallel()
	b := newBackend(t)
	listener, others := woken(t, b, expirypgx.Config{})
	eventually(t, func() error { return expirypgx.Listening(listener) })
	store, times := woken(t, b, expirypgx.Config{PollOnly: true})
	next(t, times, time.Time{}) // for rows before
	want := time.Now().Add(time.Minute).Truncate(time.Microsecond)
	store.Wake(want)
	next(t, times, want)
	last := want.Add(time.Hour)
	for _, at := range hears(t, others, elsewhere(t, b), want.Add(time.Minute)) {
		if !at.IsZero() { // it has connected anew
			t.Errorf("another process has heard %v", at)
		}
	}
	if err := checked(t, store); err != nil {
		t.Errorf("Check found %v", err)
	}
	store.Wake(last)
	next(t, times, last)
}
