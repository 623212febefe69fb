package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/silent"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// effectStore returns a Store with a handler that inserts an effect for each message.
func effectStore(t *testing.T, transactor txretry.Transactor) *inboxpgx.Store {
	t.Helper()
	p := newStore(t, transactor, "a", inboxpgx.Config{})
	handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
		return insertEffect(ctx, tx, "a", e.Number)
	})
	return p
}

func wantOneEffectEach(t *testing.T, pool *pgxpool.Pool, messages int) {
	t.Helper()
	var effects, distinct, entries int
	err := pool.QueryRow(t.Context(), `SELECT count(*), count(DISTINCT message_id), (SELECT count(*) FROM holdfast_inbox) FROM effects`).
		Scan(&effects, &distinct, &entries)
	noError(t, err)
	if effects != messages || distinct != messages || entries != messages {
		t.Errorf("%d effects of %d messages, %d entries; want %d", effects, distinct, entries, messages)
	}
}

func TestEntryIsLockedForLong(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	manager, err := txretry.New(pool, txretry.Config{MaxAttempts: 2, LockTimeout: 20 * time.Millisecond, BaseDelay: time.Millisecond})
	noError(t, err)
	p := effectStore(t, manager)
	m := event()

	other, err := pool.Begin(t.Context())
	noError(t, err)
	if _, err := other.Exec(t.Context(), `INSERT INTO holdfast_inbox (consumer, message_id) VALUES ('a', $1)`, m.ID); err != nil {
		t.Fatal(err)
	}
	err = process(t, p, m)
	if _, ok := errors.AsType[*txretry.LockTimeoutError](err); !ok || driver.Classify(err).Counted {
		t.Errorf("while a copy is in progress: %v classified %+v", err, driver.Classify(err))
	}
	noError(t, other.Rollback(t.Context()))
	noError(t, process(t, p, m))
	wantOneEffectEach(t, pool, 1)
}

// deliver processes a message once and reports whether it is done.
func deliver(t *testing.T, p inbox.Processor, m *inbox.Message, unavailable *atomic.Int64) bool {
	t.Helper()
	err := p.Process(t.Context(), []*inbox.Message{m})[0]
	if err == nil {
		return true
	}
	if f := driver.Classify(err); !errors.Is(err, driver.ErrUnavailable) || f.Counted || f.Action != driver.ActionReturn {
		t.Errorf("%v classified %+v", err, f)
		return true
	}
	unavailable.Add(1)
	select {
	case <-time.After(10 * time.Millisecond):
	case <-t.Context().Done():
		return true
	}
	return false
}

func TestMigrateOwnSchemaAndTable(t *testing.T) {
	t.Parallel()
	pool, schema := pgtest.NewSchema(t)
	p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{Schema: schema, Table: "Seen"})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := p.Migrate(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	handle(t, p, noEffect)
	noError(t, process(t, p, event()))
	if err := p.Check(t.Context()); err != nil {
		t.Errorf("Check: %v", err)
	}
	sql, err := fs.ReadFile(p.Schema(), "0003_inbox.sql")
	if err != nil || !strings.Contains(string(sql), `"Seen"`) {
		t.Errorf("exported file: %v\n%s", err, sql)
	}
	if _, err := inboxpgx.New(newManager(t, pool), "a", inboxpgx.Config{Table: "a;b"}); err == nil {
		t.Error("a table named a;b was accepted")
	}
}

// Every query exec mode works, as poolers require: the client encodes ids, arrays and durations differently
// in each.
func TestQueryExecModes(t *testing.T) {
	t.Parallel()
	pgtest.InEveryMode(t, func(t *testing.T, inMode func(*pgxpool.Pool) *pgxpool.Pool) {
		pool := inMode(newPool(t))
		p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{})
		handle(t, p, func(ctx context.Context, tx pgx.Tx, e conformance.Event) error {
			if e.Number == 1 {
				return errors.New("broken")
			}
			return insertEffect(ctx, tx, "a", e.Number)
		})
		m := numbered(99)
		for range 2 {
			noError(t, process(t, p, m))
		}
		msgs := events(4)
		for range 2 {
			if got := failedOnes(p.Process(t.Context(), append(msgs, m))); !slices.Equal(got, []int{1}) {
				t.Errorf("failed %v, want the second one", got)
			}
		}
		wantOneEffectEach(t, pool, 4)
		ledgerInMode(t, p.Ledger(), m)
		if n, err := p.Prune(t.Context()); n != 0 || err != nil {
			t.Errorf("pruned %d, error %v", n, err)
		}
		if err := p.Check(t.Context()); err != nil {
			t.Errorf("Check: %v", err)
		}
	})
}

func ledgerInMode(t *testing.T, ledger driver.Ledger, m *inbox.Message) {
	t.Helper()
	err := errors.Join(ledger.Start(t.Context(), m), ledger.End(t.Context(), m), ledger.Pass(t.Context(), m, time.Hour), ledger.Start(t.Context(), m))
	if err != nil {
		t.Error(err)
	}
	if e, err := ledger.Look(t.Context(), m.ID); err != nil || e.Open != 1 || e.Attempt != 2 {
		t.Errorf("entry %+v, error %v", e, err)
	}
	noError(t, ledger.Forget(t.Context(), m.ID))
}

// countingConn counts the packets sent.
type countingConn struct {
	net.Conn
	sent *atomic.Int64
}

func (c countingConn) Write(p []byte) (int, error) {
	c.sent.Add(1)
	return c.Conn.Write(p)
}

// A message costs the round trips of its handler, one for BEGIN with the entry, and COMMIT. A duplicate costs
// BEGIN, ROLLBACK, and a query for the entry.
func TestRoundTrips(t *testing.T) {
	t.Parallel()
	cfg := newPool(t).Config()
	var sent atomic.Int64
	dial := cfg.ConnConfig.DialFunc
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return countingConn{conn, &sent}, err
	}
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	noError(t, err)
	defer pool.Close()
	p := effectStore(t, newManager(t, pool))
	cost := func(m func() *inbox.Message) {
		t.Helper()
		for _, want := range []int64{0, 3} { // the first message prepares the statements
			sent.Store(0)
			noError(t, process(t, p, m()))
			if got := sent.Load(); want != 0 && got != want {
				t.Errorf("%d round trips for a message, want %d", got, want)
			}
		}
	}
	cost(event)
	p.Park(driver.ConsumerDefaults(inbox.ConsumerConfig{Ordered: true, ParkKeys: true}, "orders"))
	cost(func() *inbox.Message { // of a key that is not stopped
		m := event()
		m.Key = "k"
		return m
	})
	m := event()
	noError(t, process(t, p, m))
	noError(t, process(t, p, m)) // it prepares the query
	sent.Store(0)
	if err := process(t, p, m); err != nil || sent.Load() != 3 {
		t.Errorf("%d round trips for a duplicate, want 3: error %v", sent.Load(), err)
	}
}

// plain is a Transactor without Options, with handles that no function recognises.
type plain struct{ txretry.Transactor }

func (p plain) Pool() *pgxpool.Pool { return poolOf(p.Transactor) }

func poolOf(t txretry.Transactor) *pgxpool.Pool { return t.(*txretry.Manager).Pool() }

func (p plain) DoWith(ctx context.Context, _ txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return p.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, struct{ pgx.Tx }{tx}) })
}

// wrapped passes the Options on, and wraps the handles.
type wrapped struct{ txretry.Transactor }

func (w wrapped) Pool() *pgxpool.Pool { return poolOf(w.Transactor) }

func (w wrapped) DoWith(ctx context.Context, opts txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return w.Transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error { return fn(ctx, struct{ pgx.Tx }{tx}) })
}

// With any Transactor a message is recorded once, and its first delivery is not a duplicate.
func TestForeignTransactors(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	manager := newManager(t, pool)
	for n, transactor := range []txretry.Transactor{plain{manager}, wrapped{manager}} {
		p := effectStore(t, transactor)
		m := event()
		for range 2 {
			noError(t, process(t, p, m))
		}
		wantOneEffectEach(t, pool, n+1)
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// onSilent runs a test in a bubble, with a pool of idle connections to the real server, which has room for as
// many again. The clock stands still while the server works.
func onSilent(t *testing.T, test func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool)) {
	t.Helper()
	const conns = 4
	url := pgtest.URL(t)
	synctest.Test(t, func(t *testing.T) {
		s := silent.NewPostgres(t, url)
		pool := s.Pool(t, 2*conns)
		createTables(t, pool)
		pgtest.Idle(t, pool, conns)
		test(t, s, pool)
	})
}

// Each wait for a silent database ends by itself, and the call succeeds on another connection: rare calls
// after a ping of 2 s, the others when they are repeated after their timeout of 4 s.
func TestSilentConnections(t *testing.T) {
	t.Parallel()
	pgtest.URL(t) // skips before there are subtests
	for name, tt := range map[string]struct {
		call  func(ctx context.Context, p *inboxpgx.Store) error
		tries int
		took  time.Duration
	}{
		"look":  {func(ctx context.Context, p *inboxpgx.Store) error { return second(p.Ledger().Look(ctx, ids.New())) }, 2, 4 * time.Second},
		"start": {func(ctx context.Context, p *inboxpgx.Store) error { return p.Ledger().Start(ctx, event()) }, 2, 4 * time.Second},
		"pass":  {func(ctx context.Context, p *inboxpgx.Store) error { return p.Ledger().Pass(ctx, event(), time.Hour) }, 2, 4 * time.Second},
		"prune": {func(ctx context.Context, p *inboxpgx.Store) error { return second(p.Prune(ctx)) }, 1, 2 * time.Second},
		"check": {func(ctx context.Context, p *inboxpgx.Store) error { return p.Check(ctx) }, 1, 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			onSilent(t, func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool) {
				p := newStore(t, exactManager(t, pool), "a", inboxpgx.Config{})
				s.SilenceConnections()
				start, tries := time.Now(), 1
				for ; tt.call(t.Context(), p) != nil && tries < 10; tries++ {
				}
				if took := time.Since(start); took != tt.took || tries != tt.tries {
					t.Errorf("took %v and %d tries, want %v and %d", took, tries, tt.took, tt.tries)
				}
			})
		})
	}
}

// exactManager returns a manager without jitter in its pauses.
func exactManager(t *testing.T, pool *pgxpool.Pool) *txretry.Manager {
	t.Helper()
	m, err := txretry.New(pool, txretry.Config{Rand: func() float64 { return 0 }, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func second[T any](_ T, err error) error { return err }

// A connection becomes silent in the middle of a message's transaction: no failure is counted, and the
// message is redelivered and takes effect once.
func TestSilentTransaction(t *testing.T) {
	t.Parallel()
	pgtest.URL(t)                       // skips before there are subtests
	const lockTimeout = 8 * time.Second // of txretry; a statement and a COMMIT have a second more
	for name, tt := range map[string]struct {
		on   string
		took time.Duration
	}{
		"begin": {"begin", 2 * time.Second}, "statement": {"INSERT INTO effects", lockTimeout + time.Second}, "commit": {"commit", lockTimeout + time.Second},
	} {
		for _, arrives := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, delivered %v", name, arrives), func(t *testing.T) {
				t.Parallel()
				onSilent(t, func(t *testing.T, s *silent.Postgres, pool *pgxpool.Pool) {
					p := effectStore(t, exactManager(t, pool))
					s.SilenceOn(testenv.Silence{On: tt.on, Deliver: arrives})
					m := event()
					start := time.Now()
					var unavailable atomic.Int64
					for !deliver(t, p, m, &unavailable) {
					}
					want := tt.took + time.Duration(unavailable.Load())*10*time.Millisecond // the pause of deliver
					if took := time.Since(start); took != want || s.Silenced() != 1 {
						t.Errorf("took %v, want %v; %d connections silent", took, want, s.Silenced())
					}
					if err := p.Process(t.Context(), []*inbox.Message{m})[0]; err != nil {
						t.Error(err)
					}
					wantOneEffectEach(t, pool, 1)
				})
			})
		}
	}
}
