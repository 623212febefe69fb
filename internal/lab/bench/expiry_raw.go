package main

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

const holdExpired = "hold.expired"

// rawSweeper is the loop without a library: claim and change in one statement, the
// messages in another.
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

// rawMessages stores what a relay needs of one message per row, with the ids that any
// outbox gives.
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
