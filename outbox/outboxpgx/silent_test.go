package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// onSilent runs a test in a bubble. near always reaches the real server; the connections of far may fall silent. The
// statements of far are not prepared, so that a Silence matches them. The clock stands still while the server works.
func onSilent(t *testing.T, cfg outboxpgx.Config, test func(t *testing.T, s *silent.Postgres, near, far *fixture)) {
	t.Helper()
	url := pgtest.URL(t) + "&default_query_exec_mode=exec"
	synctest.Test(t, func(t *testing.T) {
		s := silent.NewPostgres(t, url)
		near := setupOn(t, silent.NewPostgres(t, url).Pool(t, 10), cfg)
		test(t, s, near, fixtureOn(t, s.Pool(t, 10), cfg))
	})
}

// If a connection falls silent in the middle of a call, before or after the server receives it, the call still ends
// in time. A call that only reads gets its answer on another connection. The other calls return an error for an
// unknown outcome, and may be called again.
func TestSilentInTheMiddleOfACall(t *testing.T) {
	t.Parallel()
	onSilent(t, outboxpgx.Config{Retention: time.Hour}, func(t *testing.T, s *silent.Postgres, near, far *fixture) {
		const timeout = 12 * time.Second
		far.store.Hasten(timeout)
		for name, c := range map[string]struct {
			on      testenv.Silence
			call    func(ctx context.Context) error
			unknown bool
		}{
			"list": {testenv.Silence{On: "died_at, seq LIMIT"}, func(ctx context.Context) error {
				return second(far.dead.List(ctx, outbox.Filter{}))
			}, false},
			"audit": {testenv.Silence{On: "actor, reason"}, func(ctx context.Context) error { return second(far.store.Audit(ctx, 0)) }, false},
			"replay": {testenv.Silence{On: "'replay'"}, func(ctx context.Context) error {
				return second(far.dead.Replay(ctx, letter(t, near.pool, "returned"), outbox.Replay{By: "me"}))
			}, true},
			"remove": {testenv.Silence{On: "'remove'", Deliver: true}, func(ctx context.Context) error {
				return second(far.dead.Remove(ctx, letter(t, near.pool, "removed"), outbox.Removal{By: "me"}))
			}, true},
		} {
			must(t, c.call(t.Context()))
			s.SilenceOn(c.on)
			before, start := s.Silenced(), time.Now()
			err := c.call(t.Context())
			if took := time.Since(start); took != timeout || s.Silenced() != before+1 {
				t.Errorf("%s took %v, %d connections fell silent", name, took, s.Silenced()-before)
			}
			if c.unknown != errors.Is(err, context.DeadlineExceeded) || !c.unknown && err != nil {
				t.Errorf("%s: the error is %v", name, err)
			}
			must(t, c.call(t.Context()))
		}
	})
}

// letter adds a dead letter and returns a filter for its name.
func letter(t *testing.T, pool *pgxpool.Pool, name string) outbox.Filter {
	t.Helper()
	_, err := pool.Exec(context.Background(), `
		INSERT INTO holdfast_outbox_dead (id, seq, lane, name, body, content_type, transport_name, exchange, routing_key, created_at, attempts, error_class, last_error)
		VALUES (gen_random_uuid(), 1, 0, $1, '1', '', '', '', '', now(), 1, '', '')`, name)
	must(t, err)
	return outbox.Filter{Name: name}
}

// soonBack is the time limit for recovery after a fault.
const soonBack = 10 * time.Second

// wantBack waits until check passes, in virtual time, and fails the test if that takes longer than soonBack.
func wantBack(t *testing.T, what string, check func() error) {
	t.Helper()
	start := time.Now()
	testenv.Eventually(t, check)
	if took := time.Since(start); took > soonBack {
		t.Errorf("%s: %v", what, took)
	}
}

// Each exchange of a relay may be the last of its connection. No call waits longer than StoreTimeout, and the next
// attempt uses another connection.
func TestSilentInTheMiddleOfARelay(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before there are subtests
	for name, on := range map[string]string{
		"claim": "holdfast_outbox_claim", "settle": "holdfast_outbox_settle", "look below": "statement_timeout", "release": "due_at <= now()", "renew": "lease_until = now() + $3",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onSilent(t, outboxpgx.Config{}, func(t *testing.T, s *silent.Postgres, near, far *fixture) {
				publisher := outboxtest.NewPublisher()
				if name == "renew" {
					publisher.Latency(time.Second)
				}
				relay := far.relay(t, publisher, outbox.RelayConfig{
					LeaseTTL: 2 * time.Second, Retry: outbox.RetryPolicy{BaseDelay: 100 * time.Millisecond},
				})
				defer run(t, relay)()
				for n, deliver := range []bool{false, true} {
					publisher.Script(errors.New("once")) // so that a message waits and is released
					s.SilenceOn(testenv.Silence{On: on, Deliver: deliver})
					near.write(t, keyed(8, 2)...)
					wantBack(t, fmt.Sprint("delivered ", deliver), func() error {
						if s.Silenced() != n+1 {
							return fmt.Errorf("%d connections fell silent", s.Silenced())
						}
						return errors.Join(near.emptyNow(t), relay.Ready(t.Context()))
					})
				}
			})
		})
	}
}

// All connections of a service with default settings fall silent at once, and later the whole server. The service
// reports it, and recovers in time.
func TestService_recoversFromSilence(t *testing.T) {
	t.Parallel()
	onSilent(t, outboxpgx.Config{}, func(t *testing.T, s *silent.Postgres, near, far *fixture) {
		publisher := outboxtest.NewPublisher()
		relay := far.relay(t, publisher, outbox.RelayConfig{})
		defer run(t, relay)()
		works := func(after string) {
			t.Helper()
			before := len(publisher.Received())
			near.write(t, keyed(8, 4)...)
			wantBack(t, after, func() error {
				if got := len(publisher.Received()) - before; got < 32 {
					return fmt.Errorf("%d of 32 received", got)
				}
				return errors.Join(relay.Ready(t.Context()), far.store.Listening())
			})
		}
		works("the start")
		for range 3 {
			s.SilenceConnections()
			works("silent connections")
		}
		s.Pause()
		wantBack(t, "noticed", func() error {
			if relay.Ready(t.Context()) == nil {
				return errors.New("the relay is ready without a store")
			}
			if far.store.Listening() == nil {
				return errors.New("Hears is true without notifications")
			}
			return nil
		})
		s.Heal()
		works("a silent server")
	})
}

// Drain continues on another connection if one falls silent during a claim, before the server receives the claim.
func TestDrainOnSilentConnection(t *testing.T) {
	t.Parallel()
	onSilent(t, outboxpgx.Config{}, func(t *testing.T, s *silent.Postgres, near, far *fixture) {
		relay := far.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{})
		near.write(t, keyed(1, 1)...)
		drain(t, relay, 1)
		near.write(t, keyed(1, 1)...)
		s.SilenceOn(testenv.Silence{On: "holdfast_outbox_claim"})
		start := time.Now()
		drain(t, relay, 1)
		if took := time.Since(start); took > storeTimeout+soonBack || s.Silenced() != 1 {
			t.Errorf("took %v, %d connections fell silent, want 1", took, s.Silenced())
		}
	})
}

// storeTimeout is the default of RelayConfig.StoreTimeout.
const storeTimeout = 5 * time.Second

// A service shuts down within ShutdownTimeout even if its server is silent.
func TestShutdownWhileSilent(t *testing.T) {
	t.Parallel()
	onSilent(t, outboxpgx.Config{}, func(t *testing.T, s *silent.Postgres, near, far *fixture) {
		const limit = 6 * time.Second
		relay := far.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{ShutdownTimeout: limit})
		stop := run(t, relay)
		untilListening(t, far.store)
		s.Pause()
		near.write(t, keyed(8, 4)...)
		wantBack(t, "noticed", func() error {
			if relay.Ready(t.Context()) == nil {
				return errors.New("the relay has not noticed")
			}
			return nil
		})
		start := time.Now()
		stop()
		if took := time.Since(start); took > limit {
			t.Errorf("the relay ended after %v, %v are allowed", took, limit)
		}
	})
}

// These are the exchanges of a listener and of notifications.
func TestSilentInTheMiddleOfAWakeUp(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before there are subtests
	for name, on := range map[string]testenv.Silence{
		"channel": {On: "SELECT $1::text ||"}, "listen": {On: "LISTEN", Deliver: true}, "probe": {On: "SELECT pg_notify", Deliver: true}, "ping": {On: "-- ping"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onSilent(t, outboxpgx.Config{}, func(t *testing.T, s *silent.Postgres, _, far *fixture) {
				s.SilenceOn(on)
				woken := listens(t, far.store)
				wantBack(t, "listening", far.store.Listening)
				if s.Silenced() != 1 {
					t.Fatalf("%d connections fell silent, want 1", s.Silenced())
				}
				s.SilenceOn(testenv.Silence{On: "SELECT pg_notify"})
				for len(woken) > 0 {
					<-woken
				}
				start := time.Now()
				fixtureOn(t, far.pool, outboxpgx.Config{}).store.Wake()
				<-woken
				if took := time.Since(start); took > soonBack {
					t.Errorf("the notification took %v", took)
				}
			})
		})
	}
}
