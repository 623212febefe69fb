package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

// base is a private Postgres, with durable settings.
type base struct {
	server  *testenv.Server
	clients int
	pools   []*pgxpool.Pool
}

// openBase starts the server, if the disk has room for twice need bytes. close removes its folder.
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

// schema returns a pool with its own tables.
func (b *base) schema(ctx context.Context, name string) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(b.server.URL())
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = int32(b.clients) + 10 // the clients, plus the relay and the queries of this command
	cfg.ConnConfig.RuntimeParams["search_path"] = name
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, err
	}
	b.pools = append(b.pools, pool)
	_, err = pool.Exec(ctx, "CREATE SCHEMA "+name)
	return pool, err
}

// number returns the number that a query selects.
func number(ctx context.Context, pool *pgxpool.Pool, sql string, args ...any) (n int64, err error) {
	err = pool.QueryRow(ctx, sql, args...).Scan(&n)
	return n, err
}

// cost is the cost of some operations.
type cost struct {
	ops              int64
	took             time.Duration
	client, postgres time.Duration // processor time
}

const measureTries = 10

// measure runs work, which returns how many operations it did. It repeats work that did none, a few times, because on a
// busy machine no operation may finish.
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
		err = fmt.Errorf("no operation finished in %v", c.took)
	}
	return c, err
}

// drive measures the clients, who repeat an operation for the given time.
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

// costColumns are the columns of cells.
var costColumns = []string{"", "operations", "a second", "client µs each", "Postgres µs each"}

func (c cost) cells(name string) []string {
	return []string{name, strconv.FormatInt(c.ops, 10), decimals(c.rate(), 0), decimals(c.clientPerOp(), 1), decimals(c.postgresPerOp(), 1)}
}

func decimals(figure float64, n int) string { return strconv.FormatFloat(figure, 'f', n, 64) }

// bytesText formats bytes in powers of 1,024.
func bytesText(n int64) string {
	units, figure := []string{"B", "KiB", "MiB", "GiB"}, float64(n)
	for len(units) > 1 && figure >= 1024 {
		units, figure = units[1:], figure/1024
	}
	return decimals(figure, min(1, 4-len(units))) + " " + units[0]
}

// outboxTable is an outbox in its own schema.
type outboxTable struct {
	pool  *pgxpool.Pool
	store *outboxpgx.Store
	body  []byte
	next  int64 // number of the next message to fill in
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

// write commits one message. Each worker has its own key.
func (o *outboxTable) write(ctx context.Context, worker int) error {
	m := outbox.Message{Name: backlog.Name, Body: o.body, Key: "writer " + strconv.Itoa(worker)}
	return pgx.BeginFunc(ctx, o.pool, func(tx pgx.Tx) error { return o.store.Write(ctx, tx, m) })
}

// fill writes n messages with SQL.
func (o *outboxTable) fill(ctx context.Context, n int64) error {
	first := o.next
	o.next += n
	return backlog.Fill(ctx, o.pool, first, n, o.body)
}

// waiting counts the waiting messages.
func (o *outboxTable) waiting(ctx context.Context) (int64, error) {
	return number(ctx, o.pool, waitingSQL)
}

const (
	waitingSQL = "SELECT count(*) FROM holdfast_outbox WHERE published_at IS NULL"
	sizeSQL    = "SELECT pg_total_relation_size($1::text::regclass)"
)

const (
	// consumer is the consumer of all entries.
	consumer = "soak"
	// entryBytes is the disk space of an entry: row, two indexes and write-ahead log.
	entryBytes = 300
	// outlived: one in this many entries is older than the retention.
	outlived = 10
	// leastPruned is the minimum of rows that a pass prunes: see leastDrained.
	leastPruned = 20_000
)

// entriesSQL writes the entries $1 to $2. Their ids are in time order, like ids of version 7, a thousand per second. The
// first $3 are older than the retention of eight days.
const entriesSQL = `
INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
SELECT '` + consumer + `', (lpad(to_hex(i >> 16), 8, '0') || '-' || lpad(to_hex(i & 65535), 4, '0') || '-7000-8000-' || lpad(to_hex(hashint8(i) & 2147483647), 12, '0'))::uuid,
       CASE WHEN i <= $3 THEN now() - interval '9 days' ELSE now() - interval '1 day' END + i * interval '1 millisecond'
FROM generate_series($1::bigint, $2::bigint) i`

// entryStep is how many entries are committed at once.
const entryStep = 1_000_000

// dedup compares an inbox without entries with one that has many.
type dedup struct {
	*base
	sizes
	small, large *inboxTable
	table        table
}

// inboxTable is an inbox in its own schema.
type inboxTable struct {
	pool  *pgxpool.Pool
	inbox *inboxpgx.Store
}

// soakDedup lets the inbox process messages for the first and a second time, in both tables, and prunes them.
func soakDedup(ctx context.Context, s sizes, r *report) error {
	b, err := openBase(ctx, s.clients, s.rows*entryBytes)
	if err != nil {
		return err
	}
	defer b.close()
	d := &dedup{base: b, sizes: s, table: table{Title: "One message, or one row that is pruned, is one operation", Columns: costColumns}}
	if d.small, err = d.newInbox(ctx, "small"); err != nil {
		return err
	}
	if d.large, err = d.newInbox(ctx, "large"); err != nil {
		return err
	}
	if err := d.pile(ctx, r); err != nil {
		return err
	}
	many := fmt.Sprintf("%d entries", s.rows)
	last := make([]*inbox.Message, s.clients)
	first, err := d.compare("first time", many, func(t *inboxTable) (cost, error) {
		return d.base.drive(ctx, s.stretch()/rounds, func(ctx context.Context, worker int) error {
			last[worker] = d.message()
			return t.process(ctx, last[worker])
		})
	})
	if err != nil {
		return err
	}
	if err := d.recordBoth(ctx, last); err != nil {
		return err
	}
	copies, err := d.compare("copy", many, func(t *inboxTable) (cost, error) {
		return d.base.drive(ctx, s.stretch()/rounds, func(ctx context.Context, worker int) error { return t.process(ctx, last[worker]) })
	})
	if err != nil {
		return err
	}
	prune, err := d.prune(ctx, many)
	if err != nil {
		return err
	}
	r.Tables = append(r.Tables, d.table)
	r.sameCost("A message and its entry beside all entries", first)
	r.sameCost("A copy beside all entries", copies)
	r.sameCost("A row that is pruned beside all entries", prune)
	return nil
}

func (d *dedup) newInbox(ctx context.Context, schema string) (*inboxTable, error) {
	pool, err := d.schema(ctx, schema)
	if err != nil {
		return nil, err
	}
	manager, err := txretry.New(pool, txretry.Config{Logger: quiet})
	if err != nil {
		return nil, err
	}
	store, err := inboxpgx.New(manager, consumer, inboxpgx.Config{Logger: quiet, PruneInterval: -1})
	if err != nil {
		return nil, err
	}
	err = inboxpgx.Handle(store, backlog.Name, func(context.Context, pgx.Tx, string) error { return nil })
	return &inboxTable{pool, store}, errors.Join(err, store.Migrate(ctx))
}

// compare measures both tables in turns.
func (d *dedup) compare(what, many string, measure func(*inboxTable) (cost, error)) (compared, error) {
	c, err := alternate(func() (cost, error) { return measure(d.small) }, func() (cost, error) { return measure(d.large) })
	if err != nil {
		return c, err
	}
	d.table.add(total(c.small).cells(what + ", no entries")...)
	d.table.add(total(c.large).cells(what + ", " + many)...)
	return c, nil
}

// recordBoth records the messages in both tables, so that they are duplicates.
func (d *dedup) recordBoth(ctx context.Context, messages []*inbox.Message) error {
	for _, m := range messages {
		if err := errors.Join(d.small.process(ctx, m), d.large.process(ctx, m)); err != nil {
			return err
		}
	}
	return nil
}

// prune adds old entries to both tables and prunes them, in turns. In the large table the first pass also takes the old
// tenth.
func (d *dedup) prune(ctx context.Context, many string) (compared, error) {
	few, next := max(d.rows/100, leastPruned), d.rows
	return d.compare("prune", many, func(t *inboxTable) (cost, error) {
		if err := t.fill(ctx, next+1, next+few, next+few); err != nil {
			return cost{}, err
		}
		next += few
		c, err := d.measure(func() (int64, error) {
			n, err := t.inbox.Prune(ctx)
			return int64(n), err
		})
		if err == nil && c.ops < few {
			err = fmt.Errorf("%d rows are pruned of at least %d", c.ops, few)
		}
		return c, err
	})
}

func (d *dedup) message() *inbox.Message {
	return &inbox.Message{ID: ids.New(), Name: backlog.Name, ContentType: "application/json", Body: backlog.Body(d.body)}
}

func (t *inboxTable) process(ctx context.Context, m *inbox.Message) error {
	return errors.Join(t.inbox.Process(ctx, []*inbox.Message{m})...)
}

// fill writes the entries first to last. Those up to old are older than the retention.
func (t *inboxTable) fill(ctx context.Context, first, last, old int64) error {
	for ; first <= last; first += entryStep {
		if _, err := t.pool.Exec(ctx, entriesSQL, first, min(first+entryStep-1, last), old); err != nil {
			return err
		}
	}
	_, err := t.pool.Exec(ctx, "VACUUM (ANALYZE) holdfast_inbox")
	return err
}

func (d *dedup) pile(ctx context.Context, r *report) error {
	began := time.Now()
	if err := d.large.fill(ctx, 1, d.rows, d.rows/outlived); err != nil {
		return err
	}
	took := time.Since(began).Round(time.Second)
	size, err := number(ctx, d.large.pool, sizeSQL, "holdfast_inbox")
	r.note("%d entries were written by generate_series in %v; table and indexes have %s, %.0f bytes an entry. A tenth of them has outlived the retention.",
		d.rows, took, bytesText(size), float64(size)/float64(d.rows))
	return err
}
