package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/backlog"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	// consumer is whose entries all are.
	consumer = "soak"
	// entryBytes is what an entry takes on disk: row, two indexes and write-ahead log.
	entryBytes = 300
	// outlived is the part of the entries that is older than the retention.
	outlived = 10
	// leastPruned is how many rows a pass prunes at least: see leastDrained.
	leastPruned = 20_000
)

// entriesSQL writes the entries $1 to $2. Their ids are in the order of time, as those of version 7 are, a
// thousand a second. The first $3 have outlived the retention of eight days.
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

// inboxTable is an inbox in a schema of its own.
type inboxTable struct {
	pool  *pgxpool.Pool
	inbox *inboxpgx.Store
}

// soakDedup has the inbox process messages for the first time and once more, in both tables, and prunes them.
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

// recordBoth makes the messages copies in both tables.
func (d *dedup) recordBoth(ctx context.Context, messages []*inbox.Message) error {
	for _, m := range messages {
		if err := errors.Join(d.small.process(ctx, m), d.large.process(ctx, m)); err != nil {
			return err
		}
	}
	return nil
}

// prune adds old entries to both tables and prunes them, in turns. In the large one the first pass takes its tenth with it.
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

// fill writes the entries first to last. Those up to old have outlived the retention.
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
