package main

import (
	"context"
	"encoding/json"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	rawLockTimeout = "set local lock_timeout = '8s'"
	rawBegin       = "begin isolation level serializable; " + rawLockTimeout
	rawDedup       = "INSERT INTO holdfast_inbox (consumer, message_id) VALUES ($1, $2) ON CONFLICT DO NOTHING"
	rawDedupMany   = `INSERT INTO holdfast_inbox (consumer, message_id)
		SELECT $1, id FROM unnest($2::uuid[]) AS id ON CONFLICT DO NOTHING RETURNING message_id`
	insertEvents = "INSERT INTO bench_events (body) SELECT unnest($1::text[])"
)

var errDuplicate = errors.New("a duplicate where there is none")

// leastWindow is the least prefetch of the raw consumers: with less they wait for the broker.
const leastWindow = 64

// rawSingle is a consumer as one writes it by hand, with as many goroutines.
func (i *intake) rawSingle(handlers int) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		check(i.consume(max(leastWindow, 4*handlers), n, watch, func(deliveries <-chan amqp.Delivery) error {
			work := make(chan amqp.Delivery)
			errs := make([]error, handlers)
			var running sync.WaitGroup
			for w := range handlers {
				running.Go(func() {
					for d := range work {
						if err := i.rawOne(ctx, d); err != nil && errs[w] == nil {
							errs[w] = err
						}
					}
				})
			}
			for range n {
				work <- <-deliveries
			}
			close(work)
			running.Wait()
			return errors.Join(errs...)
		}))
	}
}

func (i *intake) rawOne(ctx context.Context, d amqp.Delivery) error {
	var v string
	if err := json.Unmarshal(d.Body, &v); err != nil {
		return err
	}
	if err := i.rawFolded(ctx, d.MessageId, v); err != nil {
		return err
	}
	return d.Ack(false)
}

// rawFolded is a transaction of three round trips: the dedup entry travels with BEGIN.
func (i *intake) rawFolded(ctx context.Context, id, v string) error {
	return i.pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error {
		var b pgx.Batch
		b.BeginTx(pgx.TxOptions{IsoLevel: pgx.Serializable})
		b.Queue(rawLockTimeout)
		b.Queue(rawDedup, "raw", id).Exec(func(tag pgconn.CommandTag) error {
			if tag.RowsAffected() == 0 {
				return errDuplicate
			}
			return nil
		})
		results := c.SendBatch(ctx, &b)
		tx := results.Tx()
		err := results.Close()
		if err == nil {
			_, err = tx.Exec(ctx, insertEvent, v)
		}
		if err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		return tx.Commit(ctx)
	})
}

// rawBatch is one goroutine with one transaction for so many messages.
func (i *intake) rawBatch(size int) intakeRun {
	return func(ctx context.Context, n int, watch *stopwatch) {
		check(i.consume(4*size, n, watch, func(deliveries <-chan amqp.Delivery) error {
			for left := n; left > 0; left -= min(size, left) {
				if err := i.rawMany(ctx, deliveries, min(size, left)); err != nil {
					return err
				}
			}
			return nil
		}))
	}
}

func (i *intake) rawMany(ctx context.Context, deliveries <-chan amqp.Delivery, n int) error {
	all := make([]amqp.Delivery, n)
	for k := range all {
		all[k] = <-deliveries
	}
	if err := i.rawTogether(ctx, all); err != nil {
		return err
	}
	return all[n-1].Ack(true)
}

// rawTogether is one transaction for all.
func (i *intake) rawTogether(ctx context.Context, all []amqp.Delivery) error {
	keys, bodies := make([]string, len(all)), make([]string, len(all))
	for k, d := range all {
		keys[k] = d.MessageId
		if err := json.Unmarshal(d.Body, &bodies[k]); err != nil {
			return err
		}
	}
	return pgx.BeginTxFunc(ctx, i.pool, pgx.TxOptions{BeginQuery: rawBegin}, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, rawDedupMany, "raw", keys)
		if err != nil {
			return err
		}
		first, err := pgx.CollectRows(rows, pgx.RowTo[[16]byte])
		if err != nil {
			return err
		}
		if len(first) != len(all) {
			return errDuplicate
		}
		_, err = tx.Exec(ctx, insertEvents, bodies)
		return err
	})
}

// consume opens a connection, and measures what do does with the deliveries until the broker
// has read the last acknowledgement.
func (i *intake) consume(prefetch, n int, watch *stopwatch, do func(<-chan amqp.Delivery) error) error {
	conn, err := amqp.Dial(i.url)
	if err != nil {
		return err
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := ch.Qos(prefetch, 0, false); err != nil {
		return err
	}
	watch.start()
	deliveries, err := ch.Consume(i.queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	err = do(deliveries)
	err = errors.Join(err, ch.Close())
	watch.stop()
	return err
}
