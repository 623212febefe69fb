package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/expirypgx"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

func expiryWorkload() workload {
	return workload{"expiry", []part{{"drain", benchExpiryDrain}}}
}

// Names of contenders that a table, a goal and a reason share.
const (
	rawSweep      = "raw pgx, two statements"
	holdfastSweep = "holdfast"
)

// dueShare: one of this many rows is due.
const dueShare = 10

// benchExpiryDrain expires the tenth of a table that is due, in batches of 200, with one message
// per row.
func benchExpiryDrain(ctx context.Context, b *bench) {
	h := newHolds(ctx, b)
	messages := must(outboxpgx.New(h.pool, outboxpgx.Config{Logger: quiet}))
	check(messages.Migrate(ctx))
	b.measure(ctx, table{
		title:      fmt.Sprintf("expiry, %d due rows of %d", h.rows/dueShare, h.rows),
		columns:    []string{"rows/s", "client us/row"},
		yardsticks: []string{rawSweep},
		prepare:    h.fallDue,
		contenders: []contender{
			h.contender(rawSweep, h.rawSweeper),
			h.contender(holdfastSweep, h.sweeper),
		},
	})
}

// holds is a table of rows with a deadline.
type holds struct {
	pool *pgxpool.Pool
	rows int
}

// newHolds makes a table of b.rows rows. None is due.
func newHolds(ctx context.Context, b *bench) *holds {
	pool := b.postgres(ctx)
	h := &holds{pool, b.rows}
	for _, sql := range []string{
		`CREATE TABLE holds (id bigint PRIMARY KEY, status text NOT NULL, expires_at timestamptz NOT NULL, note text NOT NULL)`,
		`INSERT INTO holds SELECT n, 'held', now() + interval '1 day' + n * interval '1 ms', repeat('x', 32) FROM generate_series(1, ` + strconv.Itoa(h.rows) + `) n`,
		`CREATE INDEX ON holds (expires_at, id) WHERE status = 'held'`,
	} {
		must(pool.Exec(ctx, sql))
	}
	return h
}

// vacuum brings the table into the state of a table at rest.
func (h *holds) vacuum(ctx context.Context) {
	_, err := h.pool.Exec(ctx, "VACUUM ANALYZE holds")
	check(err)
}

// fallDue makes every tenth row held and overdue again, and empties the outbox.
func (h *holds) fallDue(ctx context.Context) error {
	_, err := h.pool.Exec(ctx, `UPDATE holds SET status = 'held', expires_at = now() - interval '1 day' + id * interval '1 ms'
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

// contender runs a sweeper over all due rows, and checks that each was expired with one message.
func (h *holds) contender(name string, newSweeper func() (sweep func(context.Context) error)) contender {
	return contender{name, func(ctx context.Context, _ time.Duration) sample {
		sweep := newSweeper()
		var watch stopwatch
		watch.start()
		check(sweep(ctx))
		watch.stop()
		n := h.rows / dueShare
		h.expect(ctx, n)
		return sample{float64(n) / watch.took.Seconds(), watch.ran.Seconds() * 1e6 / float64(n)}
	}}
}

func (h *holds) expect(ctx context.Context, want int) {
	var expired, messages int
	err := h.pool.QueryRow(ctx, "SELECT (SELECT count(*) FROM holds WHERE status = 'expired'), (SELECT count(DISTINCT ordering_key) FROM holdfast_outbox)").
		Scan(&expired, &messages)
	if err == nil && (expired != want || messages != want) {
		err = fmt.Errorf("%d rows expired with %d messages, want %d", expired, messages, want)
	}
	check(err)
}

func (h *holds) store() *expirypgx.Store {
	writer := must(outboxpgx.New(h.pool, outboxpgx.Config{PollOnly: true}))
	manager := must(txretry.New(h.pool, txretry.Config{Logger: quiet}))
	return must(expirypgx.New(manager, "holds", expirypgx.Config{
		Emit: expirypgx.Messages(writer.Write, func(row expiry.Row) (outbox.Message, error) {
			return outbox.Message{
				ID: expiry.EventID(holdExpired, row.ID, row.Deadline), Name: holdExpired, Key: row.ID,
				Body: fmt.Appendf(nil, `{"id":%s}`, row.ID), ContentType: "application/json",
			}, nil
		}),
	}))
}

// sweeper returns our own sweeper.
func (h *holds) sweeper() func(context.Context) error {
	store := h.store()
	s := must(expiry.NewSweeper(store, expiry.SweeperConfig{Logger: quiet}))
	return func(ctx context.Context) error {
		_, err := s.Sweep(ctx)
		return err
	}
}

const holdExpired = "hold.expired"

// rawSweeper is the loop without a library: one statement claims and changes rows, another stores
// the messages.
func (h *holds) rawSweeper() func(context.Context) error {
	const claim = `UPDATE holds SET status = 'expired' WHERE id = ANY(ARRAY(
		SELECT id FROM holds WHERE status = 'held' AND expires_at <= now() ORDER BY expires_at, id LIMIT 200 FOR UPDATE SKIP LOCKED)) RETURNING id`
	return func(ctx context.Context) error {
		for {
			var n int
			err := pgx.BeginFunc(ctx, h.pool, func(tx pgx.Tx) error {
				rows, err := tx.Query(ctx, claim)
				if err != nil {
					return err
				}
				expired, err := pgx.CollectRows(rows, pgx.RowTo[int64])
				if n = len(expired); err != nil || n == 0 {
					return err
				}
				return rawMessages(ctx, tx, expired)
			})
			if err != nil || n == 0 {
				return err
			}
		}
	}
}

// rawMessages stores the columns that a relay needs, one message per row, with ids like those of
// any outbox.
func rawMessages(ctx context.Context, tx pgx.Tx, rows []int64) error {
	n := len(rows)
	uuids, lanes, keys, bodies := make([]uuid.UUID, n), make([]int16, n), make([]string, n), make([][]byte, n)
	for i, row := range rows {
		m := driver.Message{ID: ids.New(), Key: fmt.Sprint(row)}
		uuids[i], lanes[i], keys[i], bodies[i] = m.ID, int16(driver.LaneOf(m)), m.Key, fmt.Appendf(nil, `{"id":%d}`, row)
	}
	_, err := tx.Exec(ctx, `INSERT INTO holdfast_outbox (id, lane, name, body, content_type, ordering_key, exchange, routing_key)
		SELECT id, lane, '`+holdExpired+`', body, 'application/json', key, '', '' FROM unnest($1::uuid[], $2::smallint[], $3::text[], $4::bytea[]) AS m(id, lane, key, body)`,
		uuids, lanes, keys, bodies)
	return err
}
