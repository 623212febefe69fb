package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	pgdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

func TestProcessorOnPostgres(t *testing.T) {
	t.Parallel()
	for _, isolation := range []pgx.TxIsoLevel{"", pgx.ReadCommitted} {
		t.Run("isolation "+string(isolation), func(t *testing.T) {
			t.Parallel()
			conformance.TestProcessor(t, conformance.Backend{New: func(t *testing.T) conformance.Fixture { return postgres(t, newPool(t), isolation) }})
		})
	}
}

func TestProcessorBehindPgBouncer(t *testing.T) {
	testenv.Nightly(t, "TestQueryExecModes runs what a pooler can change")
	t.Parallel()
	conformance.TestProcessor(t, conformance.Backend{New: func(t *testing.T) conformance.Fixture { return postgres(t, newPooled(t), "") }})
}

func TestProcessorOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestProcessor(t, conformance.Backend{Bubble: true, New: fake})
}

func TestEntriesOnPostgres(t *testing.T) {
	t.Parallel()
	conformance.TestEntries(t, conformance.EntriesBackend{New: func(t *testing.T) (txretry.Transactor, pgdriver.Entries) {
		manager := newManager(t, newPool(t))
		return manager, newStore(t, manager, "a", inboxpgx.Config{}).Entries()
	}})
}

func TestEntriesOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestEntries(t, conformance.EntriesBackend{Bubble: true, New: func(t *testing.T) (txretry.Transactor, pgdriver.Entries) {
		return txretrytest.New(txretrytest.Config{}), memory.NewEntries(time.Hour)
	}})
}

// newPool returns a pool on a schema that has the inbox table and a table for effects.
func newPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.New(t)
	createTables(t, pool)
	return pool
}

// newPooled is newPool behind a PgBouncer.
func newPooled(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.NewPooled(t)
	createTables(t, pool)
	return pool
}

func createTables(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	noError(t, newStore(t, newManager(t, pool), "a", inboxpgx.Config{}).Migrate(t.Context()))
	exec(t, pool, `CREATE TABLE effects (consumer text, number int, message_id uuid)`)
}

func newManager(t *testing.T, pool *pgxpool.Pool) *txretry.Manager {
	t.Helper()
	manager, err := txretry.New(pool, txretry.Config{})
	noError(t, err)
	return manager
}

func newStore(t *testing.T, transactor txretry.Transactor, consumer string, cfg inboxpgx.Config) *inboxpgx.Store {
	t.Helper()
	p, err := inboxpgx.New(transactor, consumer, cfg)
	noError(t, err)
	return p
}

func handle(t *testing.T, p *inboxpgx.Store, fn func(ctx context.Context, tx pgx.Tx, e conformance.Event) error) {
	t.Helper()
	noError(t, inboxpgx.Handle(p, conformance.Name, fn))
}

func insertEffect(ctx context.Context, tx pgx.Tx, consumer string, number int) error {
	m, _ := inbox.FromContext(ctx)
	_, err := tx.Exec(ctx, `INSERT INTO effects VALUES ($1, $2, $3)`, consumer, number, m.ID)
	return err
}

func postgres(t *testing.T, pool *pgxpool.Pool, isolation pgx.TxIsoLevel) conformance.Fixture {
	t.Helper()
	manager := newManager(t, pool)
	return conformance.Fixture{
		Processor: func(t *testing.T, consumer string, h conformance.Handler) inbox.Processor {
			p := newStore(t, manager, consumer, inboxpgx.Config{Isolation: isolation})
			handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
				if err := insertEffect(ctx, tx, consumer, e.Number); err != nil {
					return err
				}
				return h(ctx, e)
			})
			return p
		},
		Effects: func(t *testing.T, consumer string, number int) (n int) {
			err := pool.QueryRow(t.Context(), `SELECT count(*) FROM effects WHERE consumer = $1 AND number = $2`, consumer, number).Scan(&n)
			noError(t, err)
			return n
		},
	}
}

type effect struct {
	consumer string
	number   int
}

func fake(*testing.T) conformance.Fixture {
	manager := txretrytest.New(txretrytest.Config{})
	entries := memory.NewEntries(time.Hour)
	var mu sync.Mutex
	effects := map[effect]int{}
	add := func(e effect, n int) {
		mu.Lock()
		defer mu.Unlock()
		effects[e] += n
	}
	return conformance.Fixture{
		Processor: func(t *testing.T, consumer string, h conformance.Handler) inbox.Processor {
			p := newStore(t, manager, consumer, inboxpgx.Config{Entries: entries})
			handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
				key := effect{consumer, e.Number}
				if err := txretrytest.Effect(tx, func() { add(key, 1) }, func() { add(key, -1) }); err != nil {
					return err
				}
				return h(ctx, e)
			})
			return p
		},
		Effects: func(_ *testing.T, consumer string, number int) int {
			mu.Lock()
			defer mu.Unlock()
			return effects[effect{consumer, number}]
		},
	}
}

func TestLedgerOnPostgres(t *testing.T) {
	t.Parallel()
	conformance.TestLedger(t, func(t *testing.T) func(string) driver.Ledger {
		manager := newManager(t, newPool(t))
		return func(consumer string) driver.Ledger { return newStore(t, manager, consumer, inboxpgx.Config{}).Ledger() }
	})
}

func TestEntriesAndLedgerBehindPgBouncer(t *testing.T) {
	testenv.Nightly(t, "TestQueryExecModes runs what a pooler can change")
	t.Parallel()
	t.Run("entries", func(t *testing.T) {
		t.Parallel()
		conformance.TestEntries(t, conformance.EntriesBackend{New: func(t *testing.T) (txretry.Transactor, pgdriver.Entries) {
			manager := newManager(t, newPooled(t))
			return manager, newStore(t, manager, "a", inboxpgx.Config{}).Entries()
		}})
	})
	t.Run("ledger", func(t *testing.T) {
		t.Parallel()
		conformance.TestLedger(t, func(t *testing.T) func(string) driver.Ledger {
			manager := newManager(t, newPooled(t))
			return func(consumer string) driver.Ledger { return newStore(t, manager, consumer, inboxpgx.Config{}).Ledger() }
		})
	})
}

func TestLedgerOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestLedger(t, func(*testing.T) func(string) driver.Ledger { return memory.NewEntries(time.Hour).Ledger })
}

func TestParkingOnPostgres(t *testing.T) {
	t.Parallel()
	conformance.TestParking(t, conformance.EntriesBackend{New: func(t *testing.T) (txretry.Transactor, pgdriver.Entries) {
		manager := newManager(t, newPool(t))
		return manager, newStore(t, manager, "any", inboxpgx.Config{}).Entries()
	}})
}

func TestParkingOnFake(t *testing.T) {
	t.Parallel()
	conformance.TestParking(t, conformance.EntriesBackend{Bubble: true, New: func(*testing.T) (txretry.Transactor, pgdriver.Entries) {
		return txretrytest.New(txretrytest.Config{}), memory.NewEntries(time.Hour)
	}})
}

// Random transactions over a few ids, with savepoints and rollbacks, have the same results on the fake and on
// Postgres. The number of a sequence selects it.
func TestDifferentialDedup(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	manager := newManager(t, pool)
	table := newStore(t, manager, "a", inboxpgx.Config{}).Entries()
	known := 0
	for n := range testenv.Sequences(t, 60) {
		random := rand.New(rand.NewPCG(5, uint64(n)))
		s := dedupSequence{consumer: fmt.Sprintf("sequence %d", n), random: random}
		for range 4 {
			s.ids = append(s.ids, event())
		}
		real := s.run(t, manager, table)
		s.random = rand.New(rand.NewPCG(5, uint64(n)))
		fake := s.run(t, txretrytest.New(txretrytest.Config{}), memory.NewEntries(time.Hour))
		if !slices.Equal(real, fake) {
			t.Fatalf("sequence %d:\nPostgres\n%s\nfake\n%s", n, strings.Join(real, "\n"), strings.Join(fake, "\n"))
		}
		known += strings.Count(strings.Join(real, "\n"), "false")
	}
	if known == 0 {
		t.Error("no id was known: that proves little")
	}
}

// dedupSequence is some transactions of one consumer.
type dedupSequence struct {
	consumer string
	ids      []*inbox.Message
	random   *rand.Rand
}

func (s *dedupSequence) run(t *testing.T, m txretry.Transactor, d pgdriver.Entries) (log []string) {
	t.Helper()
	for range 6 {
		abort := s.random.IntN(3) == 0
		seed := s.random.Uint64()
		var steps []string
		err := m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			steps = nil // a new attempt
			random := rand.New(rand.NewPCG(seed, 0))
			if err := s.steps(ctx, tx, d, random, 0, &steps); err != nil {
				return err
			}
			if abort {
				return errAborted
			}
			return nil
		})
		log = append(append(log, steps...), fmt.Sprintf("end: %v", err))
	}
	return log
}

var errAborted = errors.New("aborted")

// steps runs random steps in a transaction or a savepoint.
func (s *dedupSequence) steps(ctx context.Context, tx pgx.Tx, d pgdriver.Entries, random *rand.Rand, depth int, log *[]string) error {
	var mine []uuid.UUID // recorded here for the first time
	for range 1 + random.IntN(4) {
		switch k := random.IntN(8); {
		case k < 3:
			id := s.ids[random.IntN(len(s.ids))].ID
			first, err := d.Record(ctx, tx, s.consumer, id, "")
			if err != nil {
				return err
			}
			if first {
				mine = append(mine, id)
			}
			*log = append(*log, fmt.Sprintf("record %s: %v", id, first))
		case k < 5:
			chosen := slices.Clone(s.ids)
			random.Shuffle(len(chosen), func(a, b int) { chosen[a], chosen[b] = chosen[b], chosen[a] })
			chosen = chosen[:1+random.IntN(len(chosen))]
			first, err := d.RecordAll(ctx, tx, s.consumer, chosen, nil)
			if err != nil {
				return err
			}
			for i, m := range chosen {
				if first[i] {
					mine = append(mine, m.ID)
				}
			}
			*log = append(*log, fmt.Sprintf("record %d: %v", len(chosen), first))
		case k == 5 && depth == 0 && len(mine) > 0: // as its only caller does: at the end of the transaction
			if err := d.Forget(ctx, tx, s.consumer, mine[:1]); err != nil {
				return err
			}
			*log = append(*log, fmt.Sprintf("forget %s", mine[0]))
			return nil
		case depth < 2:
			if err := s.savepoint(ctx, tx, d, random, depth, log); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *dedupSequence) savepoint(ctx context.Context, tx pgx.Tx, d pgdriver.Entries, random *rand.Rand, depth int, log *[]string) error {
	sp, err := tx.Begin(ctx)
	if err != nil {
		return err
	}
	if err := s.steps(ctx, sp, d, random, depth+1, log); err != nil {
		return err
	}
	if random.IntN(2) == 0 {
		*log = append(*log, "back to the savepoint")
		return sp.Rollback(ctx)
	}
	*log = append(*log, "release the savepoint")
	return sp.Commit(ctx)
}

// Random writes about a few messages leave the same entries in the fake ledger and in Postgres.
func TestDifferentialLedger(t *testing.T) {
	t.Parallel()
	real := newStore(t, newManager(t, newPool(t)), "a", inboxpgx.Config{}).Entries()
	fake := memory.NewEntries(time.Hour)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	compared, open := 0, 0
sequences:
	for n := range testenv.Sequences(t, 60) {
		random := rand.New(rand.NewPCG(6, uint64(n)))
		var all []uuid.UUID
		for range 3 {
			all = append(all, ids.New())
		}
		var log []string
		for range 25 {
			m := &inbox.Message{ID: all[random.IntN(len(all))], Name: "event", Attempt: random.IntN(5), Replays: random.IntN(3)}
			consumer := []string{"a", "b"}[random.IntN(2)]
			ctx := t.Context()
			if random.IntN(12) == 0 {
				ctx = ended
			}
			step := random.IntN(4)
			err1, err2 := note(ctx, real.Ledger(consumer), step, m), note(ctx, fake.Ledger(consumer), step, m)
			e1, looked1 := real.Ledger(consumer).Look(t.Context(), m.ID)
			e2, looked2 := fake.Ledger(consumer).Look(t.Context(), m.ID)
			if errors.Is(errors.Join(err1, looked1), context.DeadlineExceeded) {
				continue sequences // the machine stalled, and it is not known whether the write took effect
			}
			log = append(log, fmt.Sprintf("%s of attempt %d, replay %d for %s: Postgres %+v %v, fake %+v %v",
				[]string{"start", "end", "pass", "forget"}[step], m.Attempt, m.Replays, consumer, e1, err1, e2, err2))
			e1.Overdue, e2.Overdue = 0, 0 // of two clocks
			if e1 != e2 || (err1 == nil) != (err2 == nil) || looked1 != nil || looked2 != nil {
				t.Fatalf("sequence %d:\n%s", n, strings.Join(log, "\n"))
			}
			open += e1.Open
		}
		compared++
	}
	if t.Logf("%d sequences compared", compared); compared == 0 || open == 0 {
		t.Errorf("%d runs were open: that proves little", open)
	}
}

func note(ctx context.Context, l driver.Ledger, step int, m *inbox.Message) error {
	switch step {
	case 0:
		return l.Start(ctx, m)
	case 1:
		return l.End(ctx, m)
	case 2:
		return l.Pass(ctx, m, time.Hour)
	default:
		return l.Forget(ctx, m.ID)
	}
}
