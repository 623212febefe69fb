// Package databasesql tests what runs over database/sql: the suites that pgx passes, on pgx's own driver, and at night on
// lib/pq, of which every run tests the errors and the round trips.
package databasesql

import (
	"context"
	"database/sql"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// drivers open a database whose connections count what they send.
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

// counter dials connections that count.
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

// onEach runs a test with each driver, on a schema of its own, with lib/pq at night.
func onEach(t *testing.T, test func(t *testing.T, f *fixture)) {
	t.Helper()
	eachDriver(t, func(t *testing.T, name string) {
		if name == "lib pq" {
			testenv.Nightly(t, "the same tests on another driver")
		}
		test(t, setup(t, name))
	})
}

// eachDriver runs a test of something that differs between the drivers.
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
			t.Errorf("%d connections were not given back", n)
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
