package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

func expiryWorkload() workload {
	return workload{"expiry", []part{
		{"drain", benchExpiryDrain},
		{"idle", benchExpiryIdle},
	}}
}

// Names of contenders that goals refer to.
const (
	rawSweep      = "raw pgx, two statements"
	holdfastSweep = "holdfast"
)

// dueShare is how many rows there are for one that is due.
const dueShare = 10

// benchExpiryDrain expires the tenth of a table that is due, in batches of 200 with one
// message per row, by one sweeper and by four at once.
func benchExpiryDrain(ctx context.Context, b *bench) {
	h := newHolds(ctx, b, "holds", b.rows)
	messages := must(outboxpgx.New(h.pool, outboxpgx.Config{Logger: quiet}))
	check(messages.Migrate(ctx))
	for _, sweepers := range []int{1, 4} {
		r := b.measure(ctx, table{
			title:      fmt.Sprintf("expiry, %d due rows of %d, sweepers: %d", h.rows/dueShare, h.rows, sweepers),
			columns:    []column{{name: "rows/s"}, {name: "client us/row", decimals: 1}},
			yardsticks: []string{rawSweep},
			prepare:    h.fallDue,
			contenders: []contender{
				h.contender(rawSweep, sweepers, h.rawSweeper),
				h.contender(holdfastSweep, sweepers, h.sweeper),
			},
		})
		b.atLeast(0.9, r.ratio(holdfastSweep, rawSweep), fmt.Sprintf("of %s, sweepers: %d", rawSweep, sweepers))
	}
}

// benchExpiryIdle is a sweep, and a look, when nothing is due: in a large table and in a
// small one.
func benchExpiryIdle(ctx context.Context, b *bench) {
	const few = 200
	t := table{title: "expiry, nothing due", columns: []column{{name: "calls/s"}, {name: "p50 ms", decimals: 2}}}
	for i, rows := range []int{few, b.rows} {
		h := newHolds(ctx, b, fmt.Sprintf("holds_%d", i), rows)
		h.vacuum(ctx)
		store := h.store()
		t.contenders = append(t.contenders,
			contender{fmt.Sprintf("sweep, %d rows", rows), repeated(func(ctx context.Context) error {
				_, err := store.SweepBatch(ctx, driver.Request{Limit: 200})
				return err
			})},
			contender{fmt.Sprintf("look, %d rows", rows), repeated(func(ctx context.Context) error {
				_, err := store.Look(ctx, nil)
				return err
			})},
		)
	}
	r := b.measure(ctx, t)
	for _, what := range []string{"sweep", "look"} {
		small, large := fmt.Sprintf("%s, %d rows", what, few), fmt.Sprintf("%s, %d rows", what, b.rows)
		b.atLeast(0.9, r.ratio(large, small), fmt.Sprintf("of the rate of a %s; nothing due, %s", small, large))
	}
}

func repeated(call func(context.Context) error) func(ctx context.Context, length time.Duration) sample {
	return func(ctx context.Context, length time.Duration) sample {
		l, err := load.Drive(ctx, 1, length, func(ctx context.Context, _ int) error { return call(ctx) })
		check(err)
		return sample{l.Rate, milliseconds(l.Percentile(0.5))}
	}
}

// holds is a table of rows with a deadline.
type holds struct {
	pool  *pgxpool.Pool
	table string
	rows  int
}

// newHolds makes a table of so many rows, none of them due.
func newHolds(ctx context.Context, b *bench, name string, rows int) *holds {
	pool := b.postgres(ctx)
	h := &holds{pool, name, rows}
	for _, sql := range []string{
		`CREATE TABLE ` + name + ` (id bigint PRIMARY KEY, status text NOT NULL, expires_at timestamptz NOT NULL, note text NOT NULL)`,
		`INSERT INTO ` + name + ` SELECT n, 'held', now() + interval '1 day' + n * interval '1 ms', repeat('x', 32) FROM generate_series(1, ` + strconv.Itoa(rows) + `) n`,
		`CREATE INDEX ON ` + name + ` (expires_at, id) WHERE status = 'held'`,
	} {
		must(pool.Exec(ctx, sql))
	}
	return h
}

// vacuum leaves the table as one at rest is.
func (h *holds) vacuum(ctx context.Context) {
	_, err := h.pool.Exec(ctx, "VACUUM ANALYZE "+h.table)
	check(err)
}

// fallDue has every tenth row be held and overdue again, and empties the outbox.
func (h *holds) fallDue(ctx context.Context) error {
	_, err := h.pool.Exec(ctx, "UPDATE "+h.table+` SET status = 'held', expires_at = now() - interval '1 day' + id * interval '1 ms'
		WHERE id % `+strconv.Itoa(dueShare)+` = 0`)
	if err == nil {
		h.vacuum(ctx)
	}
	for _, sql := range []string{"TRUNCATE holdfast_outbox", "VACUUM ANALYZE holdfast_outbox", "CHECKPOINT"} {
		if err == nil {
			_, err = h.pool.Exec(ctx, sql)
		}
	}
	return err
}

// contender has sweepers expire all that is due, and wants it done with one message each.
func (h *holds) contender(name string, sweepers int, newSweeper func() (sweep func(context.Context) error)) contender {
	return contender{name, func(ctx context.Context, _ time.Duration) sample {
		errs := make([]error, sweepers)
		var watch stopwatch
		var running sync.WaitGroup
		watch.start()
		for i := range sweepers {
			sweep := newSweeper()
			running.Go(func() { errs[i] = sweep(ctx) })
		}
		running.Wait()
		watch.stop()
		n := h.rows / dueShare
		check(errors.Join(errs...))
		h.expect(ctx, n)
		return sample{float64(n) / watch.took.Seconds(), watch.ran.Seconds() * 1e6 / float64(n)}
	}}
}

func (h *holds) expect(ctx context.Context, want int) {
	var expired, messages int
	err := h.pool.QueryRow(ctx, "SELECT (SELECT count(*) FROM "+h.table+" WHERE status = 'expired'), (SELECT count(DISTINCT ordering_key) FROM holdfast_outbox)").
		Scan(&expired, &messages)
	if err == nil && (expired != want || messages != want) {
		err = fmt.Errorf("%d rows expired with %d messages, want %d", expired, messages, want)
	}
	check(err)
}

func (h *holds) store() *expirypgx.Store {
	writer := must(outboxpgx.New(h.pool, outboxpgx.Config{PollOnly: true}))
	manager := must(txretry.New(h.pool, txretry.Config{Logger: quiet}))
	return must(expirypgx.New(manager, h.table, expirypgx.Config{
		Emit: expirypgx.Messages(writer.Write, func(row expiry.Row) (outbox.Message, error) {
			return outbox.Message{
				ID: expiry.EventID(holdExpired, row.ID, row.Deadline), Name: holdExpired, Key: row.ID,
				Body: fmt.Appendf(nil, `{"id":%s}`, row.ID), ContentType: "application/json",
			}, nil
		}),
	}))
}

// sweeper is one of ours.
func (h *holds) sweeper() func(context.Context) error {
	store := h.store()
	s := must(expiry.NewSweeper(store, expiry.SweeperConfig{Logger: quiet}))
	return func(ctx context.Context) error {
		_, err := s.Sweep(ctx)
		return err
	}
}
