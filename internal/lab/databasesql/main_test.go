// Package databasesql tests the adapters over database/sql with the suites that pgx passes: on pgx's own driver, and at
// night on lib/pq. The errors and the round trips of lib/pq are tested in every run.
package databasesql

import (
	"context"
	"database/sql"
	"errors"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	inboxconformance "github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest/conformance"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// drivers open a database whose connections count round trips.
var drivers = map[string]func(t *testing.T, url string, sent *atomic.Int64) *sql.DB{
	"pgx stdlib": func(t *testing.T, url string, sent *atomic.Int64) *sql.DB {
		cfg, err := pgx.ParseConfig(url)
		must(t, err)
		cfg.DialFunc = counter{sent}.DialContext
		return stdlib.OpenDB(*cfg)
	},
	"lib pq": func(t *testing.T, url string, sent *atomic.Int64) *sql.DB {
		connector, err := pq.NewConnector(url)
		must(t, err)
		connector.Dialer(counter{sent})
		return sql.OpenDB(connector)
	},
}

// counter dials connections that count round trips.
type counter struct{ sent *atomic.Int64 }

func (c counter) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	return counting{conn, c.sent}, err
}

func (c counter) Dial(network, addr string) (net.Conn, error) {
	return c.DialContext(context.Background(), network, addr)
}

func (c counter) DialTimeout(network, addr string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return c.DialContext(ctx, network, addr)
}

type counting struct {
	net.Conn
	sent *atomic.Int64
}

func (c counting) Write(p []byte) (int, error) {
	c.sent.Add(1)
	return c.Conn.Write(p)
}

// onEach runs a test with each driver, on its own schema. lib/pq runs at night.
func onEach(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	eachDriver(t, func(t *testing.T, name string) {
		if name == "lib pq" {
			testenv.Nightly(t, "the same tests on another driver")
		}
		test(t, setup(t, name))
	})
}

// eachDriver runs a test whose results depend on the driver.
func eachDriver(t *testing.T, test func(t *testing.T, name string)) {
	t.Helper()
	pgtest.New(t) // skips before there are subtests
	for name := range drivers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, name)
		})
	}
}

type fixture struct {
	driver string
	db     *sql.DB
	sent   *atomic.Int64
	pool   *pgxpool.Pool // of the same schema
}

func setup(t *testing.T, name string) *fixture {
	t.Helper()
	url := pgtest.URL(t)
	return open(t, name, url, pgtest.Pool(t, url, 10))
}

// through returns the fixture with a database at another address.
func (f *fixture) through(t *testing.T, url string) *fixture { return open(t, f.driver, url, f.pool) }

func open(t *testing.T, driver, url string, pool *pgxpool.Pool) *fixture {
	t.Helper()
	sent := new(atomic.Int64)
	db := drivers[driver](t, url, sent)
	db.SetMaxOpenConns(10)
	t.Cleanup(func() {
		if n := db.Stats().InUse; n != 0 {
			t.Errorf("%d connections were not returned", n)
		}
		_ = db.Close()
	})
	return &fixture{driver, db, sent, pool}
}

func (f *fixture) manager(t *testing.T, cfg txretry.Config) *txretry.Manager {
	t.Helper()
	m, err := txretrysql.New(f.db, f.pool, cfg)
	must(t, err)
	return m
}

func (f *fixture) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := f.pool.Exec(t.Context(), sql, args...)
	must(t, err)
}

func (f *fixture) count(t *testing.T, sql string, args ...any) (n int) {
	t.Helper()
	must(t, f.pool.QueryRow(context.WithoutCancel(t.Context()), sql, args...).Scan(&n))
	return n
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// outbox returns an outbox with its tables.
func (f *fixture) outbox(t *testing.T) *outboxpgx.Store {
	t.Helper()
	store, err := outboxpgx.New(f.pool, outboxpgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	return store
}

// inTx runs fn in a transaction of one kind.
type inTx func(ctx context.Context, fn func(tx pgx.Tx) error) error

// wrapped runs fn in the user's own transaction.
func (f *fixture) wrapped(ctx context.Context, fn func(tx pgx.Tx) error) error {
	tx, err := f.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := fn(txretrysql.Wrap(tx)); err != nil {
		return err
	}
	return tx.Commit()
}

func backend(f *fixture, store *outboxpgx.Store, in inTx) conformance.Store {
	return conformance.Store{
		Source: store,
		InTx: func(ctx context.Context, fn func(func(...outbox.Message) error) error) error {
			return in(ctx, func(tx pgx.Tx) error {
				return fn(func(msgs ...outbox.Message) error { return store.Write(ctx, tx, msgs...) })
			})
		},
		OnceInTx: func(ctx context.Context, fn func(conformance.Once) error) error {
			return in(ctx, func(tx pgx.Tx) error {
				return fn(func(key string, m outbox.Message) (uuid.UUID, bool, error) { return store.WriteOnce(ctx, tx, key, m) })
			})
		},
		DeadLetters: store.DeadLetters(),
	}
}

func TestOutboxWriter(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, one *fixture) {
		managed := func(t *testing.T) conformance.Managed {
			f := setup(t, one.driver)
			m, store := f.manager(t, txretry.Config{}), f.outbox(t)
			return conformance.Managed{
				Store: backend(f, store, func(ctx context.Context, fn func(tx pgx.Tx) error) error {
					return m.Do(ctx, func(_ context.Context, tx pgx.Tx) error { return fn(tx) })
				}),
				Manager: m, Write: store.Write, WriteOnce: store.WriteOnce,
				Break: func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, "SELECT 1/0")
					return err
				},
			}
		}
		t.Run("managed", func(t *testing.T) {
			t.Parallel()
			conformance.TestWriter(t, conformance.Backend{Open: func(t *testing.T) conformance.Store { return managed(t).Store }})
		})
		t.Run("errors", func(t *testing.T) {
			t.Parallel()
			conformance.TestManagedWriter(t, conformance.ManagedBackend{Open: managed})
		})
		t.Run("wrapped", func(t *testing.T) {
			t.Parallel()
			testenv.Nightly(t, "the same suite in transactions of the user's own")
			conformance.TestWriter(t, conformance.Backend{Open: func(t *testing.T) conformance.Store {
				f := setup(t, one.driver)
				return backend(f, f.outbox(t), f.wrapped)
			}})
		})
	})
}

// The commit of a Manager wakes a relay. After a transaction of the user's own, Wake does.
func TestOutboxWakesARelay(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		store := f.outbox(t)
		woken := make(chan struct{}, 10)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			store.Background(ctx, func() bool { woken <- struct{}{}; return true })
		}()
		defer func() { cancel(); <-ended }()
		await := func(what string) {
			t.Helper()
			select {
			case <-woken:
			case <-time.After(testenv.Patience):
				t.Errorf("%s woke no relay", what)
			}
		}
		m := outbox.Message{Name: "a", Body: []byte("1")}
		testenv.Eventually(t, func() error {
			if !store.Hears() {
				return errors.New("no relay listens")
			}
			return nil
		})
		for len(woken) > 0 { // the wake-ups at the start, and when it listens
			<-woken
		}
		must(t, f.manager(t, txretry.Config{}).Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) }))
		await("a Manager")
		for len(woken) > 0 {
			<-woken
		}
		must(t, f.wrapped(ctx, func(tx pgx.Tx) error { return store.Write(ctx, tx, m) }))
		store.Wake()
		await("Wake")
	})
}

// inbox returns a store of one consumer whose handler has an effect in the *sql.Tx and then calls fn.
func (f *fixture) inbox(t *testing.T, cfg txretry.Config, consumer string, fn func(ctx context.Context, tx pgx.Tx, number int) error) *inboxpgx.Store {
	t.Helper()
	store, err := inboxpgx.New(f.manager(t, cfg), consumer, inboxpgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	f.exec(t, `CREATE TABLE IF NOT EXISTS effects (consumer text, number int)`)
	must(t, inboxpgx.Handle(store, inboxconformance.Name, func(ctx context.Context, tx pgx.Tx, e inboxconformance.Event) error {
		if _, err := txretrysql.Tx(tx).ExecContext(ctx, `INSERT INTO effects VALUES ($1, $2)`, consumer, e.Number); err != nil {
			return err
		}
		return fn(ctx, tx, e.Number)
	}))
	return store
}

func event(number string) *inbox.Message {
	return &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: inboxconformance.Name, Body: []byte(`{"number": ` + number + `}`), ContentType: "application/json", Attempt: 1}
}

func TestInboxProcessor(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, one *fixture) {
		inboxconformance.TestProcessor(t, inboxconformance.Backend{New: func(t *testing.T) inboxconformance.Fixture {
			f := setup(t, one.driver)
			return inboxconformance.Fixture{
				Processor: func(t *testing.T, consumer string, h inboxconformance.Handler) inbox.Processor {
					return f.inbox(t, txretry.Config{}, consumer, func(ctx context.Context, _ pgx.Tx, number int) error {
						return h(ctx, inboxconformance.Event{Number: number})
					})
				},
				Effects: func(t *testing.T, consumer string, number int) int {
					return f.count(t, `SELECT count(*) FROM effects WHERE consumer = $1 AND number = $2`, consumer, number)
				},
			}
		}})
	})
}

// In a batch, a conflict repeats the whole batch. Other failures affect only their own message.
func TestInboxBatch(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		conflicts := 2
		store := f.inbox(t, txretry.Config{BaseDelay: time.Millisecond}, "a", func(ctx context.Context, tx pgx.Tx, number int) (err error) {
			switch {
			case number == 2:
				_, err = txretrysql.Tx(tx).ExecContext(ctx, raise("23505"))
			case number == 3 && conflicts > 0:
				conflicts--
				_, err = txretrysql.Tx(tx).ExecContext(ctx, raise("40001"))
			}
			return err
		})
		messages := []*inbox.Message{event("1"), event("2"), event("3")}
		for range 2 { // the second time, all but the failed one are duplicates
			results := store.Process(t.Context(), messages)
			if results[0] != nil || results[1] == nil || results[2] != nil {
				t.Errorf("results %v", results)
			}
		}
		if n := f.count(t, `SELECT count(*) FROM effects`); n != 2 || conflicts != 0 {
			t.Errorf("%d effects, %d conflicts left", n, conflicts)
		}
	})
}

// A connection that the server closes during a handler does not count as a failure of the message.
func TestInboxConnectionLost(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		store := f.inbox(t, txretry.Config{}, "a", func(ctx context.Context, tx pgx.Tx, _ int) error {
			var pid int
			must(t, txretrysql.Tx(tx).QueryRowContext(ctx, "select pg_backend_pid()").Scan(&pid))
			f.exec(t, "select pg_terminate_backend($1, 5000)", pid)
			_, err := txretrysql.Tx(tx).ExecContext(ctx, "select 1")
			return err
		})
		err := store.Process(t.Context(), []*inbox.Message{event("1")})[0]
		if !driver.Classify(err).Unavailable {
			t.Errorf("error %v, want one of inbox.Unavailable", err)
		}
	})
}

func (f *fixture) idempotency(t *testing.T, cfg idempotencypgx.Config) *idempotencypgx.Store {
	t.Helper()
	store, err := idempotencypgx.New(f.manager(t, txretry.Config{}), cfg)
	must(t, err)
	must(t, store.Migrate(t.Context()))
	return store
}

// place adds one to the counter and returns a response.
func place(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
	if err := add(ctx, txretrysql.Tx(tx)); err != nil {
		return idempotency.Response{}, err
	}
	return idempotency.JSON(http.StatusCreated, "placed")
}

// The effect in the *sql.Tx and the record commit together: once per key, with the same answer.
func TestIdempotencyRecord(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		f.exec(t, tables)
		store := f.idempotency(t, idempotencypgx.Config{})
		key := idempotency.NewKey()
		boom := errors.New("boom")
		_, _, err := store.DoKey(t.Context(), key, nil, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
			resp, err := place(ctx, tx)
			return resp, errors.Join(err, boom)
		})
		if !errors.Is(err, boom) || f.count(t, "select n from counter") != 0 {
			t.Errorf("error %v, and an effect", err)
		}
		var all sync.WaitGroup
		var placed, inUse, replays atomic.Int64
		for range 8 {
			all.Go(func() {
				resp, replayed, err := store.DoKey(t.Context(), key, nil, place)
				switch {
				case errors.Is(err, idempotency.ErrKeyInUse):
					inUse.Add(1)
				case err != nil || resp.Status != http.StatusCreated || string(resp.Body) != "\"placed\"\n" && string(resp.Body) != `"placed"`:
					t.Errorf("%d %s, error %v", resp.Status, resp.Body, err)
				case replayed:
					replays.Add(1)
				default:
					placed.Add(1)
				}
			})
		}
		all.Wait()
		if n := f.count(t, "select n from counter"); n != 1 || placed.Load() != 1 || inUse.Load()+replays.Load() != 7 {
			t.Errorf("%d effects, %d placed, %d in use, %d replays", n, placed.Load(), inUse.Load(), replays.Load())
		}
		fresh := f.idempotency(t, idempotencypgx.Config{}) // a new store, whose transaction finds the record
		resp, replayed, err := fresh.DoKey(t.Context(), key, nil, place)
		if !replayed || err != nil || resp.Status != http.StatusCreated || resp.Header.Get("Content-Type") == "" || !strings.Contains(string(resp.Body), "placed") {
			t.Errorf("%d %v %s, replayed %v, error %v", resp.Status, resp.Header, resp.Body, replayed, err)
		}
	})
}

// A COMMIT whose answer is lost is resolved with the record.
func TestIdempotencyCommitReplyLost(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, f *fixture) {
		f.exec(t, tables)
		proxy := testenv.NewProxy(t, f.pool.Config().ConnString())
		store := f.through(t, proxy.URL()).idempotency(t, idempotencypgx.Config{})
		commit := map[string]string{"pgx stdlib": "commit", "lib pq": "COMMIT"}[f.driver]
		proxy.SilenceOn(testenv.Silence{On: commit, Deliver: true, OneWay: true})
		healed := make(chan struct{})
		go func() {
			defer close(healed)
			testenv.Eventually(t, func() error {
				if f.count(t, "select n from counter") != 1 {
					return errors.New("not committed")
				}
				return nil
			})
			proxy.Heal() // resets the connection that has lost an answer
		}()
		resp, replayed, err := store.DoKey(t.Context(), idempotency.NewKey(), nil, place)
		<-healed
		if err != nil || replayed || resp.Status != http.StatusCreated {
			t.Errorf("%d, replayed %v, error %v", resp.Status, replayed, err)
		}
	})
}
