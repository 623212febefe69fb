package expirytest_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirytest"
	"github.com/holdfast-go/holdfast/internal/expiry/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Test(t, func(t *testing.T) conformance.Backend { return newBackend(t) }, synctest.Test)
}

type backend struct {
	manager *txretrytest.Manager
	table   *expirytest.Store
	emit    conformance.Emit // of the table, set by Store
	mu      sync.Mutex
	events  map[string]int
}

func newBackend(t *testing.T) *backend {
	t.Helper()
	b := &backend{manager: txretrytest.New(txretrytest.Config{}), events: map[string]int{}}
	b.table = b.store(t, expirytest.Config{Emit: func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		if b.emit == nil {
			return nil
		}
		return b.emit(ctx, tx, rows)
	}})
	return b
}

func (b *backend) store(t *testing.T, cfg expirytest.Config) *expirytest.Store {
	t.Helper()
	s, err := expirytest.New(b.manager, cfg)
	must(t, err)
	return s
}

func (b *backend) Store(t *testing.T, emit conformance.Emit) driver.Store {
	t.Helper()
	b.emit = emit
	return b.table
}

func (b *backend) Put(t *testing.T, id, state string, in time.Duration) {
	t.Helper()
	err := b.manager.Do(t.Context(), func(_ context.Context, tx pgx.Tx) error {
		return b.table.Put(tx, id, time.Now().Add(in), state) // timing: a deadline of the row
	})
	must(t, err)
}

func (b *backend) State(t *testing.T, id string) string {
	t.Helper()
	_, state, _ := b.table.Get(id)
	return state
}

func (b *backend) Announce(_ context.Context, tx pgx.Tx, row expiry.Row) error {
	add := func(n int) func() {
		return func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.events[row.ID] += n
		}
	}
	return txretrytest.Effect(tx, add(1), add(-1))
}

func (b *backend) Fail(_ context.Context, tx pgx.Tx, sqlState string) error {
	return txretrytest.Fail(tx, &pgconn.PgError{Code: sqlState})
}

func (b *backend) Announced(t *testing.T, id string) int {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.events[id]
}

func TestNewReportsEveryViolation(t *testing.T) {
	t.Parallel()
	_, err := expirytest.New(nil, expirytest.Config{Active: func() []expiry.Row { return nil }})
	for _, want := range []string{"transactor", "Expire"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
}

// A sweeper on the half-hour schedule knows of a hold as soon as it has committed, and
// not if it is rolled back.
func TestDueWakesTheSweeper(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBackend(t)
		var swept []time.Time
		holds := b.store(t, expirytest.Config{Emit: func(context.Context, pgx.Tx, []expiry.Row) error {
			swept = append(swept, time.Now())
			return nil
		}})
		sweeper, err := expiry.NewSweeper(holds, expiry.SweeperConfig{Logger: slog.New(slog.DiscardHandler)})
		must(t, err)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- sweeper.Run(ctx) }()
		time.Sleep(10 * time.Second)
		hold := func(id string, in time.Duration, fail error) time.Time {
			deadline := time.Now().Add(in)
			err := b.manager.Do(ctx, func(_ context.Context, tx pgx.Tx) error {
				if !holds.Due(tx, deadline) {
					t.Error("Due does not know the transaction")
				}
				return errors.Join(holds.Put(tx, id, deadline, "held"), fail)
			})
			if !errors.Is(err, fail) {
				t.Error(err)
			}
			return deadline
		}
		hold("never", time.Second, errors.New("no"))
		deadline := hold("seat A1", 2*time.Second, nil)
		if holds.Due(nil, deadline) {
			t.Error("Due takes a transaction that is nobody's")
		}
		time.Sleep(5 * time.Second)
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if len(swept) != 1 || swept[0].Before(deadline) || swept[0].Sub(deadline) > time.Second {
			t.Errorf("expired at %v, want %v", swept, deadline)
		}
	})
}

// A sweeper may have looked before it is woken for rows: it is told to look once more, and of a row
// made at that moment.
func TestBackgroundTellsOfTheRowsBefore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		holds := newBackend(t).store(t, expirytest.Config{})
		deadline := time.Now().Add(time.Minute)
		var told []time.Time
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go holds.Background(ctx, func(at time.Time) {
			told = append(told, at)
			if at.IsZero() {
				holds.Wake(deadline)
			}
		})
		synctest.Wait()
		if len(told) != 2 || !told[0].IsZero() || !told[1].Equal(deadline) {
			t.Errorf("told of rows at %v, want an unknown time and %v", told, deadline)
		}
	})
}
