package httpapi_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/flow"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/memory"
	"github.com/holdfast-go/holdfast/examples/reservation/internal/postgres"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// There is no sweeper: a hold past its deadline is over all the same, and buyers take over its seats.
func TestDeadline(t *testing.T) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) { testDeadline(t, newShop(t, 0), func() { time.Sleep(time.Minute) }) })
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		s := newPostgresShop(t)
		testDeadline(t, s, func() { // moves the deadline of every hold into the past
			_, err := s.pool.Exec(t.Context(), `with seats as (update seats set held_until = now() - interval '1 second' where state = 'held')
				update reservations set expires_at = now() - interval '1 second' where status = 'held'`)
			noError(t, err)
		})
	})
}

func testDeadline(t *testing.T, s *shop, expire func()) {
	e := s.event(`{"name":"Concert","seats":3}`)
	named, counted := s.hold(e.ID, `"seats":["A1"]`), s.hold(e.ID, `"quantity":2`)
	s.do(post("/api/reservations", holdBody(e.ID, `"quantity":1`)).as("bob")).wants(http.StatusConflict, "SEATS_UNAVAILABLE")
	expire()
	var shown reservation
	s.do(get("/api/reservations/"+counted.ID)).wants(http.StatusOK, "").into(&shown)
	if shown.Status != "expired" || s.taken(e.ID) != 0 {
		t.Errorf("past the deadline: %s, %d seats taken", shown.Status, s.taken(e.ID))
	}
	for _, path := range []string{"/confirm", "/cancel"} {
		s.do(post("/api/reservations/"+named.ID+path, "")).wants(http.StatusConflict, "RESERVATION_EXPIRED")
	}
	for _, rest := range []string{`"seats":["A1"]`, `"quantity":1`} { // the second frees both seats of the hold it takes over
		s.do(post("/api/reservations", holdBody(e.ID, rest)).as("bob")).wants(http.StatusCreated, "")
	}
	if s.taken(e.ID) != 2 || s.messages() != 6 {
		t.Errorf("%d seats taken, %d messages, want 2, and 6 of 4 holds and 2 expiries", s.taken(e.ID), s.messages())
	}
}

// run runs relay, consumer and sweeper until the returned function is called.
func (s *shop) run() (stop func()) {
	ctx, cancel := context.WithCancel(s.t.Context())
	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{s.parts.Relay.Run, s.parts.Consumer.Run, s.parts.Sweeper.Run} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				s.t.Error(err)
			}
		})
	}
	return func() {
		cancel()
		running.Wait()
	}
}

func (s *shop) wantsStats(eventID string, want booking.Stats) {
	s.t.Helper()
	var got booking.Stats
	s.do(get("/api/events/"+eventID+"/stats")).wants(http.StatusOK, "").into(&got)
	if got != want {
		s.t.Errorf("stats are %+v, want %+v", got, want)
	}
}

func TestStatsAndSweeper(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, 0)
		defer s.run()()
		e := s.event(`{"name":"Concert","seats":9}`)
		s.wantsStats(e.ID, booking.Stats{})
		confirmed, cancelled := s.hold(e.ID, `"quantity":2`), s.hold(e.ID, `"quantity":2`)
		s.hold(e.ID, `"quantity":2`)
		s.do(post("/api/reservations/"+confirmed.ID+"/confirm", "")).wants(http.StatusOK, "")
		s.do(post("/api/reservations/"+cancelled.ID+"/cancel", "")).wants(http.StatusOK, "")
		time.Sleep(5 * time.Second)
		s.wantsStats(e.ID, booking.Stats{Held: 1, Confirmed: 1, Cancelled: 1})
		time.Sleep(time.Minute)
		s.wantsStats(e.ID, booking.Stats{Expired: 1, Confirmed: 1, Cancelled: 1})
		if n := s.taken(e.ID); n != 2 {
			t.Errorf("%d seats are taken after the sweep, want 2", n)
		}
	})
}

// TestStatsInAnyOrder delivers the messages backwards, and twice.
func TestStatsInAnyOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newShop(t, 0)
		e := s.event(`{"name":"Concert","seats":9}`)
		r := s.hold(e.ID, `"quantity":2`)
		s.hold(e.ID, `"quantity":2`)
		s.do(post("/api/reservations/"+r.ID+"/confirm", "")).wants(http.StatusOK, "")
		msgs := s.parts.Outbox.Pending()
		slices.Reverse(msgs)
		for _, m := range append(msgs, msgs...) {
			noError(t, s.parts.Broker.Send(t.Context(), &inbox.Message{ID: m.ID, Name: m.Name, Body: m.Body}))
		}
		defer s.run()() // the relay sends all of them once more
		time.Sleep(10 * time.Second)
		s.wantsStats(e.ID, booking.Stats{Held: 1, Confirmed: 1})
	})
}

// onBoth runs a test on both back ends.
func onBoth(t *testing.T, test func(t *testing.T, s *shop)) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		test(t, newShop(t, 0))
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		test(t, newPostgresShop(t))
	})
}

// newPostgresShop is newShop on a real database; keys and limits stay in memory.
func newPostgresShop(t *testing.T) *shop {
	t.Helper()
	pool := pgtest.New(t)
	must := func(err error) {
		t.Helper()
		noError(t, err)
	}
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	must(err)
	must(store.Migrate(t.Context()))
	must(postgres.Migrate(t.Context(), pool))
	parts, err := memory.Open(memory.Config{})
	must(err)
	transactor, err := txretry.New(pool, txretry.Config{})
	must(err)
	once, err := idempotencypgx.New(transactor, idempotencypgx.Config{Gate: parts.Keys})
	must(err)
	must(once.Migrate(t.Context()))
	holds, err := expirypgx.New(transactor, "reservations", expirypgx.Config{PollOnly: true})
	must(err)
	backend := postgres.NewShop(pool, once, store, holds, flow.New())
	return &shop{
		t: t, handler: newHandler(t, parts, backend, 1_000_000), pool: pool,
		messages: func() (n int) {
			must(pool.QueryRow(t.Context(), "select count(*) from holdfast_outbox").Scan(&n))
			return n
		},
	}
}

// A confirm waits for the lock of its reservation until the deadline is over.
func TestPostgres_deadlineWhileWaiting(t *testing.T) {
	t.Parallel()
	s := newPostgresShop(t)
	r := s.hold(s.event(`{"name":"Concert","seats":3}`).ID, `"quantity":1`)
	tx, err := s.pool.Begin(t.Context())
	noError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }() // it is over already
	const lock = "update reservations set expires_at = clock_timestamp() where id = $1"
	if _, err := tx.Exec(t.Context(), lock, r.ID); err != nil {
		t.Fatal(err)
	}
	confirm := make(chan answer)
	go func() { confirm <- s.do(post("/api/reservations/"+r.ID+"/confirm", "")) }()
	testenv.Eventually(t, func() error {
		var waiting int
		err := s.pool.QueryRow(t.Context(), "select count(*) from pg_stat_activity where $1::integer = any(pg_blocking_pids(pid))", tx.Conn().PgConn().PID()).Scan(&waiting)
		if err == nil && waiting == 0 {
			err = errors.New("nothing waits for the lock")
		}
		return err
	})
	_, err = tx.Exec(t.Context(), lock, r.ID) // a moment after the other transaction began
	noError(t, errors.Join(err, tx.Commit(t.Context())))
	(<-confirm).wants(http.StatusConflict, "RESERVATION_EXPIRED")
}

// insist sends a request again, with its key, while the shop cannot answer it.
func (s *shop) insist(r request) answer {
	for {
		if a := s.do(r); a.Code != http.StatusServiceUnavailable {
			return a
		}
	}
}

// Many buyers want overlapping pairs of seats at once: each seat goes to one of them.
func TestPostgres_sellsEachSeatOnce(t *testing.T) {
	t.Parallel()
	s := newPostgresShop(t)
	e := s.event(`{"name":"Rush","seats":10}`)
	pairs := []string{`"A1","A2"`, `"A3","A2"`, `"A3","A4"`, `"A1","A4"`, `"A5","A1"`}
	var crowd sync.WaitGroup
	var mu sync.Mutex
	sold := map[string]int{}
	for i := range 50 {
		crowd.Go(func() {
			a := s.insist(post("/api/reservations", holdBody(e.ID, `"seats":[`+pairs[i%len(pairs)]+`]`)).as(fmt.Sprint("user-", i)))
			mu.Lock()
			defer mu.Unlock()
			var held reservation
			if a.Code == http.StatusCreated {
				a.into(&held)
			} else if a.Code != http.StatusConflict {
				t.Errorf("answer is %d: %s", a.Code, a.Body)
			}
			for _, seat := range held.Seats {
				sold[seat]++
			}
		})
	}
	crowd.Wait()
	for seat, n := range sold {
		if n != 1 {
			t.Errorf("seat %s was sold %d times", seat, n)
		}
	}
	if taken := s.taken(e.ID); taken != len(sold) || taken < 2 {
		t.Errorf("%d seats were sold, %d are taken", len(sold), taken)
	}
}

// Reservations are confirmed and cancelled at the same time, each twice: each ends once.
func TestPostgres_endsAReservationOnce(t *testing.T) {
	t.Parallel()
	s := newPostgresShop(t)
	const reservations = 10
	e := s.event(`{"name":"Concert","seats":10}`)
	for range reservations {
		held := s.hold(e.ID, `"quantity":1`)
		var crowd sync.WaitGroup
		var ended atomic.Int32
		for _, wish := range []string{"confirm", "cancel", "confirm", "cancel"} {
			crowd.Go(func() {
				switch a := s.insist(post("/api/reservations/"+held.ID+"/"+wish, "")); a.Code {
				case http.StatusOK:
					ended.Add(1)
				case http.StatusConflict:
				default:
					t.Errorf("%s is answered by %d %s", wish, a.Code, a.Body)
				}
			})
		}
		crowd.Wait()
		if n := ended.Load(); n != 1 {
			t.Errorf("a reservation ended %d times", n)
		}
	}
	if n := s.messages(); n != 2*reservations {
		t.Errorf("%d messages, want one of each hold and one of each end", n)
	}
}
