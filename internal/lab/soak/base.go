package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// base is a private Postgres, with durable settings.
type base struct {
	server  *testenv.Server
	clients int
	pools   []*pgxpool.Pool
}

// openBase starts it, if the disk has room for need bytes and as much again. Its folder is removed by close.
func openBase(ctx context.Context, clients int, need int64) (*base, error) {
	var disk syscall.Statfs_t
	if err := syscall.Statfs(os.TempDir(), &disk); err != nil {
		return nil, err
	}
	if free := int64(disk.Bavail) * disk.Bsize; free < 2*need {
		return nil, fmt.Errorf("%s has %s free, want %s: make the part smaller", os.TempDir(), bytesText(free), bytesText(2*need))
	}
	server, err := testenv.Launch(ctx, testenv.Postgres)
	return &base{server: server, clients: clients}, err
}

func (b *base) close() error {
	for _, pool := range b.pools {
		pool.Close()
	}
	return b.server.Close()
}

// schema returns a pool whose tables are its own.
func (b *base) schema(ctx context.Context, name string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(b.server.URL())
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = int32(b.clients) + 10 // beside the clients there are a relay and what looks
	cfg.ConnConfig.RuntimeParams["search_path"] = name
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	b.pools = append(b.pools, pool)
	_, err = pool.Exec(ctx, "CREATE SCHEMA "+name)
	return pool, err
}

// number is the answer of a query.
func number(ctx context.Context, pool *pgxpool.Pool, sql string, args ...any) (n int64, err error) {
	err = pool.QueryRow(ctx, sql, args...).Scan(&n)
	return n, err
}

// cost is what some operations took.
type cost struct {
	ops              int64
	took             time.Duration
	client, postgres time.Duration // processor time
}

const measureTries = 10

// measure runs work, which returns how many operations it did. Work that did none is run again, some times: the machine
// may be so busy that none gets to its end.
func (b *base) measure(work func() (ops int64, err error)) (cost, error) {
	before, err := b.server.CPUTime()
	if err != nil {
		return cost{}, err
	}
	client, began := load.CPUTime(), time.Now()
	ops := int64(0)
	for try := 0; ops == 0 && try < measureTries; try++ {
		if ops, err = work(); err != nil {
			return cost{}, err
		}
	}
	c := cost{ops: ops, took: time.Since(began), client: load.CPUTime() - client}
	after, err := b.server.CPUTime()
	c.postgres = after - before
	if err == nil && ops == 0 {
		err = fmt.Errorf("nothing was done in %v, nothing can be said", c.took)
	}
	return c, err
}

// drive is measure of the clients, who repeat an operation for so long.
func (b *base) drive(ctx context.Context, length time.Duration, op func(ctx context.Context, worker int) error) (cost, error) {
	return b.measure(func() (int64, error) {
		l, err := load.Drive(ctx, b.clients, length, op)
		return int64(l.Done), err
	})
}

func (c cost) rate() float64 { return float64(c.ops) / c.took.Seconds() }

func (c cost) clientPerOp() float64   { return perOp(c.client, c.ops) }
func (c cost) postgresPerOp() float64 { return perOp(c.postgres, c.ops) }

// perOp is in microseconds.
func perOp(d time.Duration, ops int64) float64 { return float64(d.Microseconds()) / float64(ops) }

// costColumns are those of cells.
var costColumns = []string{"", "operations", "a second", "client µs each", "Postgres µs each"}

func (c cost) cells(name string) []string {
	return []string{name, strconv.FormatInt(c.ops, 10), decimals(c.rate(), 0), decimals(c.clientPerOp(), 1), decimals(c.postgresPerOp(), 1)}
}

func decimals(figure float64, n int) string { return strconv.FormatFloat(figure, 'f', n, 64) }

// bytesText is in powers of 1,024.
func bytesText(n int64) string {
	units, figure := []string{"B", "KiB", "MiB", "GiB"}, float64(n)
	for len(units) > 1 && figure >= 1024 {
		units, figure = units[1:], figure/1024
	}
	return decimals(figure, min(1, 4-len(units))) + " " + units[0]
}

// outboxTable is an outbox in a schema of its own.
type outboxTable struct {
	pool  *pgxpool.Pool
	store *outboxpgx.Store
	body  []byte
	next  int64 // number of the next message that is filled in
}

func (b *base) newOutbox(ctx context.Context, schema string, body int) (*outboxTable, error) {
	pool, err := b.schema(ctx, schema)
	if err != nil {
		return nil, err
	}
	store, err := outboxpgx.New(pool, outboxpgx.Config{Logger: quiet})
	if err != nil {
		return nil, err
	}
	return &outboxTable{pool, store, backlog.Body(body), 1}, store.Migrate(ctx)
}

// write commits one message: each worker has a key of its own.
func (o *outboxTable) write(ctx context.Context, worker int) error {
	m := outbox.Message{Name: backlog.Name, Body: o.body, Key: "writer " + strconv.Itoa(worker)}
	return pgx.BeginFunc(ctx, o.pool, func(tx pgx.Tx) error { return o.store.Write(ctx, tx, m) })
}

// fill writes n messages on the server's side.
func (o *outboxTable) fill(ctx context.Context, n int64) error {
	first := o.next
	o.next += n
	return backlog.Fill(ctx, o.pool, first, n, o.body)
}

// waiting counts what waits.
func (o *outboxTable) waiting(ctx context.Context) (int64, error) {
	return number(ctx, o.pool, waitingSQL)
}

const (
	waitingSQL = "SELECT count(*) FROM holdfast_outbox WHERE published_at IS NULL"
	sizeSQL    = "SELECT pg_total_relation_size($1::text::regclass)"
)
