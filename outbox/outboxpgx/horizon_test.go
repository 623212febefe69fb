package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// raiseFloors drains messages for longer than the floors lag behind.
func (f *fixture) raiseFloors(t *testing.T, r *outbox.Relay) {
	t.Helper()
	for begin := time.Now(); time.Since(begin) < 4*outboxpgx.AskInterval; { // timing: the floors move once per interval
		f.write(t, keyed(64, 1)...)
		drain(t, r, 64)
	}
}

// raiseFloorsAbove raises the highest floor above a number. The floors wait for every transaction of the server,
// including those of other tests.
func (f *fixture) raiseFloorsAbove(t *testing.T, r *outbox.Relay, seq int64) {
	t.Helper()
	testenv.Eventually(t, func() error {
		f.raiseFloors(t, r)
		if _, high := f.floors(t); high <= seq {
			return fmt.Errorf("the highest floor is %d, want it above %d", high, seq)
		}
		return nil
	})
}

// floors returns the lowest and the highest floor.
func (f *fixture) floors(t *testing.T) (low, high int64) {
	t.Helper()
	f.scan(t, `SELECT min(floor), max(floor) FROM holdfast_outbox_lanes`, &low, &high)
	return low, high
}

// A transaction that took its number early and commits late is still published, immediately, and before later
// messages of its key.
func TestFloorsWaitForOpenTransactions(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{})
	f.raiseFloors(t, relay)
	late, err := f.pool.Begin(t.Context())
	must(t, err)
	defer late.Rollback(context.WithoutCancel(t.Context()))
	seq := f.writeLate(t, late)
	f.raiseFloors(t, relay)
	f.wantLateFirst(t, relay, publisher, seq, func() error { return late.Commit(t.Context()) })
}

// writeLate writes the message "late" in an open transaction, and returns its number.
func (f *fixture) writeLate(t *testing.T, tx pgx.Tx) (seq int64) {
	t.Helper()
	must(t, f.store.Write(t.Context(), tx, outbox.Message{Name: "late", Key: "k", Body: []byte("1")}))
	must(t, tx.QueryRow(t.Context(), `SELECT seq FROM holdfast_outbox WHERE ordering_key = 'k'`).Scan(&seq))
	return seq
}

// wantLateFirst commits the transaction of writeLate. The floors wait until then, and not longer.
func (f *fixture) wantLateFirst(t *testing.T, relay *outbox.Relay, publisher *outboxtest.Publisher, seq int64, commit func() error) {
	t.Helper()
	if _, high := f.floors(t); high > seq {
		t.Errorf("a floor is at %d, and %d is not committed yet", high, seq)
	}
	before := len(publisher.Received())
	must(t, commit())
	f.write(t, outbox.Message{Name: "early", Key: "k", Body: []byte("2")})
	drain(t, relay, 2)
	if got := publisher.Received()[before:]; got[0].Name != "late" {
		t.Errorf("received %+v", got)
	}
	f.raiseFloorsAbove(t, relay, seq)
}

// A parked message becomes ready below the floor of its lane.
func TestFloorsGoDownToParkedMessages(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{Retry: outbox.RetryPolicy{BaseDelay: time.Hour, MaxDelay: time.Hour}})
	publisher.Script(errors.New("once"))
	f.write(t, outbox.Message{Name: "first", Key: "k", Body: []byte("1")})
	drainAll(t, relay)
	f.raiseFloorsAbove(t, relay, 1)
	f.write(t, outbox.Message{Name: "second", Key: "k", Body: []byte("2")})
	f.exec(t, `UPDATE holdfast_outbox SET due_at = now() WHERE name = 'first'`)
	before := len(publisher.Received())
	report, err := relay.Drain(t.Context(), outbox.Bounds{Limit: 2, TimeLimit: testenv.Patience})
	must(t, err)
	got := publisher.Received()[before:]
	if report.Published != 2 || got[0].Name != "first" || got[1].Name != "second" {
		t.Errorf("%v: %+v", report, got)
	}
}

// Sequence numbers restart under running relays, like after a failover that lost some. When one relay notices it,
// every relay drops its knowledge of the old numbers, and all messages are found at once.
func TestFloors_afterSequenceRestart(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	second, err := outboxpgx.New(f.pool, outboxpgx.Config{Logger: quiet})
	must(t, err)
	relays := []*outbox.Relay{f.relay(t, publisher, outbox.RelayConfig{}), (&fixture{store: second}).relay(t, publisher, outbox.RelayConfig{})}
	for _, relay := range relays {
		testenv.Eventually(t, func() error {
			f.raiseFloors(t, relay)
			if low, _ := f.floors(t); low < 2 {
				return errors.New("the floors do not rise")
			}
			return nil
		})
	}
	f.exec(t, `TRUNCATE holdfast_outbox RESTART IDENTITY`)
	f.write(t, keyed(64, 1)...) // messages of every lane
	testenv.Eventually(t, func() error {
		for _, relay := range relays {
			if _, err := relay.Drain(t.Context(), outbox.Bounds{}); err != nil {
				return err
			}
		}
		return f.emptyNow(t)
	})
	for n := range 10 {
		f.write(t, keyed(64, 1)...)
		drain(t, relays[n%2], 64)
	}
}

// A relay may not notice a failover that lost numbers, because a pool replaces idle connections without an error. The
// relay's knowledge of the lost numbers raises no floor above the numbers that the server assigns next.
func TestFloors_afterFailoverThatLostNumbers(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres)
	f := setupOn(t, pgtest.Pool(t, server.URL(), 4), outboxpgx.Config{})
	relay := f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{})
	last := func() (seq int64) {
		t.Helper()
		f.scan(t, `SELECT last_value FROM holdfast_outbox_seq_seq`, &seq)
		return seq
	}
	exec := func(sql string, args ...any) {
		t.Helper()
		f.exec(t, sql, args...)
	}
	raise := func(above int64) {
		t.Helper()
		testenv.Eventually(t, func() error {
			f.raiseFloors(t, relay)
			if low, _ := f.floors(t); low <= above {
				return fmt.Errorf("the floors are at %d, want more than %d", low, above)
			}
			return nil
		})
	}
	const lost = 1000
	raise(1)
	exec(`CREATE TABLE replicated AS SELECT lane, floor FROM holdfast_outbox_lanes`)
	replicated := last()
	raise(replicated + lost)

	must(t, server.Restart(t.Context()))
	f.pool.Reset()
	exec(`UPDATE holdfast_outbox_lanes l SET floor = r.floor FROM replicated r WHERE r.lane = l.lane`)
	exec(`SELECT setval('holdfast_outbox_seq_seq', $1)`, replicated)
	for last() < replicated+lost/2 {
		f.write(t, keyed(64, 1)...)
		drain(t, relay, 64)
		if _, high := f.floors(t); high > last()+1 {
			t.Fatalf("a floor is at %d, and the next number is %d", high, last()+1)
		}
	}
}

// Numbers that start below the floors, and grow past them, are published in order. This happens after a switch to a
// replica that has the floors but not the sequence, and after a restart of the sequence by hand while no relay runs.
func TestFloors_orderWhenNumbersReachThem(t *testing.T) {
	t.Parallel()
	const floor = 1000
	raise := `UPDATE holdfast_outbox_lanes SET floor = ` + fmt.Sprint(floor)
	for name, prepare := range map[string]func(t *testing.T, f *fixture, relay *outbox.Relay, server *testenv.Server){
		"on another server": func(t *testing.T, f *fixture, relay *outbox.Relay, server *testenv.Server) {
			f.write(t, keyed(1, 1)...)
			drain(t, relay, 1)
			must(t, server.Restart(t.Context()))
			f.pool.Reset()
			f.exec(t, raise)
		},
		"a relay that starts": func(t *testing.T, f *fixture, _ *outbox.Relay, _ *testenv.Server) {
			f.exec(t, raise)
			f.exec(t, `TRUNCATE holdfast_outbox RESTART IDENTITY`)
		},
		"after a look": func(t *testing.T, f *fixture, relay *outbox.Relay, _ *testenv.Server) {
			f.exec(t, raise)
			f.write(t, keyed(1, 1)...)
			drainLate(t, relay, 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := testenv.Private(t, testenv.Postgres)
			f := setupOn(t, pgtest.Pool(t, server.URL(), 4), outboxpgx.Config{})
			publisher := outboxtest.NewPublisher()
			relay := f.relay(t, publisher, outbox.RelayConfig{})
			prepare(t, f, relay, server)
			f.write(t, outbox.Message{Name: "a", Key: "k", Body: []byte("1")})
			f.exec(t, `SELECT setval('holdfast_outbox_seq_seq', $1)`, floor)
			f.write(t, outbox.Message{Name: "a", Key: "k", Body: []byte("2")})
			drainLate(t, relay, 2)
			wantKey(t, publisher, "k", "1", "2")
		})
	}
}

// drainLate drains until the wanted number is published. On a busy server, a scan below the floors may time out, and
// a later one finds the messages.
func drainLate(t *testing.T, r *outbox.Relay, want int) {
	t.Helper()
	published := 0
	testenv.Eventually(t, func() error {
		report, err := r.Drain(t.Context(), outbox.Bounds{})
		must(t, err)
		if published += report.Published; published < want {
			return fmt.Errorf("published %d, want %d", published, want)
		}
		return nil
	})
	if published > want {
		t.Errorf("published %d, want %d", published, want)
	}
}

// emptyNow returns an error while messages are left.
func (f *fixture) emptyNow(t *testing.T) error {
	t.Helper()
	var left int
	f.scan(t, `SELECT count(*) FROM holdfast_outbox`, &left)
	if left > 0 {
		return fmt.Errorf("%d messages left", left)
	}
	return nil
}

// If a floor is wrong, its messages are late, but not lost.
func TestWrongFloorLosesNothing(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{})
	drain(t, relay, 0)
	f.exec(t, `UPDATE holdfast_outbox_lanes SET floor = 1000000`)
	const keys, n = 50, 40 // more than one batch
	f.write(t, keyed(keys, n)...)
	drainAll(t, relay) // finds nothing, unless a scan below the floors is due
	defer run(t, relay)()
	f.untilEmpty(t, testenv.Patience)
	checkLedger(t, publisher.Received(), keys, n)
}

func TestHorizon(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answers [][]string // to the questions sent after 10, 20, ... were seen
		want    int64
	}{
		"nobody writes":         {[][]string{{}, {}}, 11},
		"one question":          {[][]string{{}}, 1},
		"a writer stays":        {[][]string{{"a"}, {"a", "b"}, {"a"}}, 1},
		"a writer ends":         {[][]string{{"a", "b"}, {"b", "c"}, {"c"}}, 11},
		"others came meanwhile": {[][]string{{"a"}, {"b"}, {"b"}, {"b"}}, 11},
		"and end":               {[][]string{{"a"}, {"b"}, {"b"}, {"c"}}, 21},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var h outboxpgx.Horizon
			for i, writers := range c.answers {
				h.Ask(int64(i+1)*10, slices.Clone(writers))
			}
			if got := h.Limit(); got != c.want {
				t.Errorf("limit %d, want %d", got, c.want)
			}
			h.Forget()
			if got := h.Limit(); got != 1 {
				t.Errorf("limit %d after a failure of the database", got)
			}
			if got := fmt.Sprint(h.Ask(5, nil), h.Limit()); got != "true 1" {
				t.Errorf("after a failure: %s", got)
			}
		})
	}
}

// The scan below the floors is short, whatever it meets.
func TestClaim_notDelayedByScanBelowFloors(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.write(t, keyed(1, 1)...)
	f.exec(t, `UPDATE holdfast_outbox_lanes SET floor = 10`)
	tx, err := f.pool.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	_, err = tx.Exec(t.Context(), `SELECT FROM holdfast_outbox_lanes FOR UPDATE`)
	must(t, err)
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
		_, err := f.store.Claim(ctx, driver.Claim{Limit: 1, Lease: time.Minute})
		cancel()
		must(t, err)
	}
}

// A prepared transaction keeps its locks and stays in the list of their holders, without a session.
func TestFloorsWaitForPreparedTransactions(t *testing.T) {
	t.Parallel()
	server := testenv.Private(t, testenv.Postgres, "-c", "max_prepared_transactions=2")
	f := setupOn(t, pgtest.Pool(t, server.URL(), 8), outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	relay := f.relay(t, publisher, outbox.RelayConfig{})
	f.raiseFloors(t, relay)
	conn, err := f.pool.Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	late, err := conn.Begin(t.Context())
	must(t, err)
	seq := f.writeLate(t, late)
	f.raiseFloors(t, relay)
	_, err = conn.Exec(t.Context(), `PREPARE TRANSACTION 'late'`)
	must(t, err)
	defer func() { _, _ = f.pool.Exec(context.WithoutCancel(t.Context()), `ROLLBACK PREPARED 'late'`) }()
	f.raiseFloors(t, relay)
	f.raiseFloors(t, relay)
	f.wantLateFirst(t, relay, publisher, seq, func() error {
		_, err := f.pool.Exec(t.Context(), `COMMIT PREPARED 'late'`)
		return err
	})
}
