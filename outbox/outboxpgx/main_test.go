package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry"
)

func TestMain(m *testing.M) {
	if os.Getenv(crashURL) != "" {
		os.Exit(crashRelay())
	}
	os.Exit(testenv.Run(m))
}

var quiet = slog.New(slog.DiscardHandler)

// fixture is an outbox in a separate schema.
type fixture struct {
	pool    *pgxpool.Pool
	manager *txretry.Manager
	store   *outboxpgx.Store
	dead    outbox.DeadLetters
}

func setup(t *testing.T, cfg outboxpgx.Config) *fixture {
	t.Helper()
	return setupOn(t, pgtest.New(t), cfg)
}

func setupOn(t *testing.T, pool *pgxpool.Pool, cfg outboxpgx.Config) *fixture {
	t.Helper()
	f := fixtureOn(t, pool, cfg)
	must(t, f.store.Migrate(t.Context()))
	return f
}

// fixtureOn is like setupOn, but without the tables.
func fixtureOn(t *testing.T, pool *pgxpool.Pool, cfg outboxpgx.Config) *fixture {
	t.Helper()
	f := &fixture{pool: pool}
	var err error
	f.manager, err = txretry.New(pool, txretry.Config{Logger: quiet})
	must(t, err)
	if cfg.Logger == nil {
		cfg.Logger = quiet
	}
	f.store, err = outboxpgx.New(pool, cfg)
	must(t, err)
	f.dead = f.store.DeadLetters()
	return f
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// until waits for a condition; failure is the error while it does not hold.
func until(t *testing.T, failure string, holds func() bool) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if !holds() {
			return errors.New(failure)
		}
		return nil
	})
}

// untilReceived waits until n messages have been received.
func untilReceived(t *testing.T, p *outboxtest.Publisher, n int) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if got := len(p.Received()); got < n {
			return fmt.Errorf("%d of %d received", got, n)
		}
		return nil
	})
}

// exec runs statements on the database.
func (f *fixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := f.pool.Exec(t.Context(), sql, args...)
	must(t, err)
}

// scan reads the one row of a query.
func (f *fixture) scan(t testing.TB, sql string, into ...any) {
	t.Helper()
	must(t, f.pool.QueryRow(t.Context(), sql).Scan(into...))
}

// untilTrue waits until a query returns true.
func (f *fixture) untilTrue(t *testing.T, failure, sql string, args ...any) {
	t.Helper()
	until(t, failure, func() (holds bool) {
		must(t, f.pool.QueryRow(t.Context(), sql, args...).Scan(&holds))
		return holds
	})
}

// drainAll drains a relay and returns its report.
func drainAll(t *testing.T, r *outbox.Relay) outbox.Report {
	t.Helper()
	report, err := r.Drain(t.Context(), outbox.Bounds{})
	must(t, err)
	return report
}

func (f *fixture) write(t testing.TB, msgs ...outbox.Message) {
	t.Helper()
	must(t, f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return f.store.Write(ctx, tx, msgs...) }))
}

func (f *fixture) relay(t testing.TB, p driver.Publisher, cfg outbox.RelayConfig) *outbox.Relay {
	t.Helper()
	cfg.Logger = quiet
	r, err := outbox.NewRelay(f.store, p, cfg)
	must(t, err)
	return r
}

// backend returns the fixture for the conformance suite.
func (f *fixture) backend(inTx func(context.Context, func(func(...outbox.Message) error) error) error) conformance.Store {
	return conformance.Store{
		Source: f.store,
		InTx:   inTx,
		OnceInTx: func(ctx context.Context, fn func(conformance.Once) error) error {
			return f.manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
				return fn(func(key string, m outbox.Message) (uuid.UUID, bool, error) {
					return f.store.WriteOnce(ctx, tx, key, m)
				})
			})
		},
		DeadLetters: f.dead, Parked: f.store.Parked(),
	}
}

// keyed returns messages 0 to n-1 of each key, interleaved over the keys.
func keyed(keys, n int) []outbox.Message {
	var msgs []outbox.Message
	for i := range n {
		for k := range keys {
			msgs = append(msgs, outbox.Message{Name: "order.placed", Key: "key-" + strconv.Itoa(k), Body: []byte(strconv.Itoa(i))})
		}
	}
	return msgs
}

// checkLedger checks that all messages were received, and the first receptions of each key in order.
func checkLedger(t *testing.T, received []driver.Message, keys, n int) (duplicates int) {
	t.Helper()
	next := map[string]int{}
	for _, m := range received {
		i, err := strconv.Atoi(string(m.Body))
		must(t, err)
		switch {
		case i == next[m.Key]:
			next[m.Key]++
		case i < next[m.Key]:
			duplicates++
		default:
			t.Fatalf("%s: received %d, want %d first", m.Key, i, next[m.Key])
		}
	}
	if len(next) != keys {
		t.Errorf("%d of %d keys received", len(next), keys)
	}
	for key, got := range next {
		if got != n {
			t.Errorf("%s: %d of %d received", key, got, n)
		}
	}
	return duplicates
}

// untilEmpty does not use Stats, which relies on the floors.
func (f *fixture) untilEmpty(t *testing.T, patience time.Duration) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var left int
		err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox WHERE published_at IS NULL`).Scan(&left)
		if err == nil && left > 0 {
			err = fmt.Errorf("%d left", left)
		}
		return err
	})
}

// run starts relays, and stop ends them.
func run(t *testing.T, relays ...*outbox.Relay) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, r := range relays {
		wg.Go(func() {
			if err := r.Run(ctx); err != nil {
				t.Errorf("Run: %v", err)
			}
		})
	}
	return func() { cancel(); wg.Wait() }
}

func drain(t *testing.T, r *outbox.Relay, want int) {
	t.Helper()
	report, err := r.Drain(t.Context(), outbox.Bounds{})
	must(t, err)
	if report.Published != want {
		t.Errorf("published %d, want %d", report.Published, want)
	}
}

func untilListening(t *testing.T, store *outboxpgx.Store) {
	t.Helper()
	testenv.Eventually(t, store.Listening)
}

func second[T any](_ T, err error) error { return err }

// wantKey compares the received messages of a key.
func wantKey(t *testing.T, p *outboxtest.Publisher, key string, want ...string) {
	t.Helper()
	if got := of(p.Received(), key); !slices.Equal(got, want) {
		t.Errorf("%s: received %q, want %q", key, got, want)
	}
}

// of returns the bodies of the received messages of a key, in order.
func of(received []driver.Message, key string) (bodies []string) {
	for _, m := range received {
		if m.Key == key {
			bodies = append(bodies, string(m.Body))
		}
	}
	return bodies
}

// kind returns the part of an error that must be the same in both implementations.
func kind(err error) string {
	var state interface{ SQLState() string }
	var refused *outbox.MessageError
	switch {
	case err == nil:
		return "done"
	case errors.Is(err, errOnPurpose):
		return "on purpose"
	case errors.As(err, &refused):
		return "refused " + refused.Field
	case errors.As(err, &state):
		return state.SQLState()
	case errors.Is(err, pgx.ErrTxClosed):
		return "closed"
	}
	return strings.TrimPrefix(strings.TrimPrefix(err.Error(), "outboxpgx: "), "outboxtest: ")
}

var errOnPurpose = errors.New("on purpose")
