package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// far returns a pool through a proxy whose statements can be seen there, since none is prepared.
func far(t *testing.T, direct *pgxpool.Pool) (*pgxpool.Pool, *testenv.Proxy) {
	t.Helper()
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	return pgtest.Pool(t, proxy.URL()+"&default_query_exec_mode=exec", 4), proxy
}

// A connection that falls silent in the middle of a call, before the server has heard of it or after,
// ends the call in time. What only reads is answered on another connection; the rest says that it is
// not known, and may be called again.
func TestSilentInTheMiddleOfACall(t *testing.T) {
	t.Parallel()
	direct := pgtest.New(t)
	setupOn(t, direct, outboxpgx.Config{Retention: time.Hour})
	for name, c := range map[string]struct {
		on      testenv.Silence
		call    func(ctx context.Context, far *fixture) error
		unknown bool
	}{
		"list": {testenv.Silence{On: "died_at, seq LIMIT"}, func(ctx context.Context, far *fixture) error {
			return second(far.dead.List(ctx, outbox.Filter{}))
		}, false},
		"count": {testenv.Silence{On: "SELECT count", Deliver: true}, func(ctx context.Context, far *fixture) error {
			return second(far.dead.Count(ctx, outbox.Filter{}))
		}, false},
		"audit": {testenv.Silence{On: "actor, reason"}, func(ctx context.Context, far *fixture) error { return second(far.store.Audit(ctx, 0)) }, false},
		"check": {testenv.Silence{On: "SELECT clock_timestamp"}, func(ctx context.Context, far *fixture) error {
			return far.store.Check(ctx)
		}, false},
		"choose": {testenv.Silence{On: "array_agg"}, func(ctx context.Context, far *fixture) error {
			return second(far.dead.Replay(ctx, letter(t, direct, "chosen"), outbox.Replay{DryRun: true}))
		}, false},
		"replay": {testenv.Silence{On: "'replay'"}, func(ctx context.Context, far *fixture) error {
			return second(far.dead.Replay(ctx, letter(t, direct, "returned"), outbox.Replay{By: "me"}))
		}, true},
		"remove": {testenv.Silence{On: "'remove'", Deliver: true}, func(ctx context.Context, far *fixture) error {
			return second(far.dead.Remove(ctx, letter(t, direct, "removed"), outbox.Removal{By: "me"}))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, proxy := far(t, direct)
			distant := fixtureOn(t, pool, outboxpgx.Config{Retention: time.Hour})
			distant.store.Hasten(12 * time.Second)
			must(t, c.call(t.Context(), distant))
			proxy.SilenceOn(c.on)
			err := c.call(t.Context(), distant)
			if proxy.Silenced() != 1 {
				t.Fatalf("%d connections fell silent, want 1", proxy.Silenced())
			}
			if c.unknown != errors.Is(err, context.DeadlineExceeded) || !c.unknown && err != nil {
				t.Errorf("the error is %v", err)
			}
			must(t, c.call(t.Context(), distant))
		})
	}
}

// letter adds a dead letter and returns what selects those of its name.
func letter(t *testing.T, pool *pgxpool.Pool, name string) outbox.Filter {
	t.Helper()
	_, err := pool.Exec(t.Context(), `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error)
		VALUES (gen_random_uuid(), 1, 0, $1, '1', '', '', '', '', now(), 1, '', '')`, name)
	must(t, err)
	return outbox.Filter{Name: name}
}

// Each exchange of a relay may be the last of its connection: nothing waits for longer than
// StoreTimeout, and the next try goes on on another one.
func TestSilentInTheMiddleOfARelay(t *testing.T) {
	t.Parallel()
	pgtest.New(t) // skips before there are subtests
	for name, on := range map[string]string{
		"claim": "holdfast_outbox_claim", "settle": "holdfast_outbox_settle", "look below": "statement_timeout", "release": "due_at <= now()", "renew": "lease_until = now() + $3",
	} {
		for _, deliver := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, delivered %v", name, deliver), func(t *testing.T) {
				t.Parallel()
				direct := pgtest.New(t)
				near := setupOn(t, direct, outboxpgx.Config{})
				pool, proxy := far(t, direct)
				publisher := outboxtest.NewPublisher()
				publisher.Script(errors.New("once")) // so that a message waits and is released
				if name == "renew" {
					publisher.Latency(time.Second)
				}
				relay := fixtureOn(t, pool, outboxpgx.Config{}).relay(t, publisher, outbox.RelayConfig{
					PollInterval: 50 * time.Millisecond, LeaseTTL: 2 * time.Second, ShutdownTimeout: 3 * time.Second,
					Retry: outbox.RetryPolicy{BaseDelay: 100 * time.Millisecond},
				})
				near.write(t, keyed(8, 2)...)
				proxy.SilenceOn(testenv.Silence{On: on, Deliver: deliver})
				defer run(t, relay)()
				near.untilEmpty(t, testenv.Patience)
				testenv.Eventually(t, func() error {
					if proxy.Silenced() != 1 {
						if name == "renew" { // a lease that ran out in a stall is not renewed
							near.write(t, keyed(8, 1)...)
							near.untilEmpty(t, testenv.Patience)
						}
						return fmt.Errorf("%d connections fell silent, want 1", proxy.Silenced())
					}
					return nil
				})
				near.write(t, keyed(8, 1)...)
				near.untilEmpty(t, testenv.Patience)
				testenv.Eventually(t, func() error { return relay.Ready(t.Context()) })
			})
		}
	}
}

// recovery is within which time all works again after a fault. A calm machine takes an eighth of it, and
// a wait without a bound never ends.
const recovery = testenv.Patience / 5

// All connections of a service with the defaults fall silent at once, and later the whole server: it
// says so, and is back in time.
func TestServiceGetsOverSilence(t *testing.T) {
	t.Parallel()
	direct := pgtest.New(t)
	near := setupOn(t, direct, outboxpgx.Config{})
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	pool := pgtest.Pool(t, proxy.URL(), 10)
	publisher := outboxtest.NewPublisher()
	distant := fixtureOn(t, pool, outboxpgx.Config{})
	relay := distant.relay(t, publisher, outbox.RelayConfig{})
	defer run(t, relay)()
	works := func() {
		t.Helper()
		began := time.Now()
		before := len(publisher.Received())
		near.write(t, keyed(8, 4)...)
		for _, check := range []func() error{
			func() error {
				if got := len(publisher.Received()) - before; got < 32 {
					return fmt.Errorf("%d of 32 received", got)
				}
				return nil
			},
			func() error { return relay.Ready(t.Context()) },
			distant.store.Listening,
		} {
			testenv.Eventually(t, check)
		}
		t.Logf("after %v", time.Since(began).Round(100*time.Millisecond))
	}
	works()
	for range 3 {
		proxy.SilenceConnections()
		works()
	}
	proxy.Pause()
	testenv.Eventually(t, func() error {
		if relay.Ready(t.Context()) == nil {
			return errors.New("the relay is ready, and has no store")
		}
		if distant.store.Listening() == nil {
			return errors.New("the store listens, and hears nothing")
		}
		return nil
	})
	proxy.Heal()
	works()
}

// A Drain comes over a connection that falls silent in a claim, before the server has heard of it.
func TestDrainOnSilentConnection(t *testing.T) {
	t.Parallel()
	direct := pgtest.New(t)
	near := setupOn(t, direct, outboxpgx.Config{})
	pool, proxy := far(t, direct)
	distant := fixtureOn(t, pool, outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	relay := distant.relay(t, publisher, outbox.RelayConfig{})
	near.write(t, keyed(1, 1)...)
	drain(t, relay, 1)
	near.write(t, keyed(1, 1)...)
	proxy.SilenceOn(testenv.Silence{On: "holdfast_outbox_claim"})
	drain(t, relay, 1)
	if proxy.Silenced() != 1 {
		t.Errorf("%d connections fell silent, want 1", proxy.Silenced())
	}
}

// A service ends in time also while its server is silent.
func TestShutdownWhileSilent(t *testing.T) {
	t.Parallel()
	direct := pgtest.New(t)
	near := setupOn(t, direct, outboxpgx.Config{})
	proxy := testenv.NewProxy(t, direct.Config().ConnString())
	pool := pgtest.Pool(t, proxy.URL(), 10)
	publisher := outboxtest.NewPublisher()
	distant := fixtureOn(t, pool, outboxpgx.Config{})
	const limit = 6 * time.Second
	relay := distant.relay(t, publisher, outbox.RelayConfig{ShutdownTimeout: limit})
	stop := run(t, relay)
	untilListening(t, distant.store)
	proxy.Pause()
	near.write(t, keyed(8, 4)...)
	testenv.Eventually(t, func() error {
		if relay.Ready(t.Context()) == nil {
			return errors.New("the relay has not noticed")
		}
		return nil
	})
	begin := time.Now()
	stop()
	if took := time.Since(begin); took > limit+testenv.Patience/10 {
		t.Errorf("the relay ended after %v, %v are allowed", took, limit)
	}
}

// The exchanges of listening, and of telling.
func TestSilentInTheMiddleOfAWakeUp(t *testing.T) {
	t.Parallel()
	pgtest.New(t)
	for name, on := range map[string]testenv.Silence{
		"channel": {On: "SELECT $1::text ||"}, "listen": {On: "LISTEN", Deliver: true}, "probe": {On: "SELECT pg_notify", Deliver: true}, "ping": {On: "-- ping"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			direct := pgtest.New(t)
			setupOn(t, direct, outboxpgx.Config{})
			pool, proxy := far(t, direct)
			distant := fixtureOn(t, pool, outboxpgx.Config{})
			proxy.SilenceOn(on)
			woken := listens(t, distant.store)
			testenv.Eventually(t, distant.store.Listening)
			if proxy.Silenced() != 1 {
				t.Fatalf("%d connections fell silent, want 1", proxy.Silenced())
			}
			proxy.SilenceOn(testenv.Silence{On: "SELECT pg_notify"})
			for len(woken) > 0 {
				<-woken
			}
			fixtureOn(t, pool, outboxpgx.Config{}).store.Wake()
			select {
			case <-woken:
			case <-time.After(recovery):
				t.Error("the notification was lost with its connection")
			}
		})
	}
}
