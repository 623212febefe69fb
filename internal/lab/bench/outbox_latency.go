package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxamqp"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	rawNotify   = "raw, NOTIFY in the transaction"
	oursNotify  = "holdfast, Notifier and Listener"
	latencyPart = 4 // runs are longer by this factor: p99 needs many messages
)

// Columns of a latency table.
const (
	colConfirm50 = iota
	colConfirm99
	colArrival50
	colArrival99
)

// benchLatency measures from the return of the commit to the confirm, and to a consumer that acks
// automatically, at a steady rate and with default settings.
func benchLatency(ctx context.Context, b *bench) {
	d := newDrain(ctx, b, nil)
	must(d.pool.Exec(ctx, "CREATE TABLE raw_outbox (id uuid PRIMARY KEY, body bytea NOT NULL)"))
	for _, at := range []struct {
		rate  int
		bound float64
	}{{50, 1.7}, {1000, 2.5}} {
		from := func(start startRelay) func(context.Context, time.Duration) sample {
			return func(ctx context.Context, length time.Duration) sample {
				return d.travel(ctx, at.rate, latencyPart*length, start)
			}
		}
		r := b.measure(ctx, table{
			title: fmt.Sprintf("outbox, latency from commit at %d messages/s", at.rate),
			columns: []string{
				"confirm p50 ms",
				"p99 ms",
				"consumer p50 ms",
				"p99 ms",
			},
			yardsticks: []string{rawNotify},
			prepare:    d.reset,
			contenders: []contender{
				{rawNotify, from(d.startRaw)},
				{"holdfast, Relay.Wake", from(d.startHoldfast(false))},
				{oursNotify, from(d.startHoldfast(true))},
			},
		})
		b.atMost(at.bound, r.ratio(oursNotify, rawNotify), fmt.Sprintf("x %s, p50 commit to confirm at %d/s, %s", rawNotify, at.rate, oursNotify))
	}
}

// write stores messages in the transaction.
type write func(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error

// journey records when each message passed each point.
type journey struct {
	mu                            sync.Mutex
	committed, confirmed, arrived map[uuid.UUID]time.Time
}

func (j *journey) note(at map[uuid.UUID]time.Time, id uuid.UUID) {
	now := time.Now()
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, before := at[id]; !before {
		at[id] = now
	}
}

// complete reports whether n messages have passed all points.
func (j *journey) complete(n int) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.confirmed) == n && len(j.arrived) == n
}

// waits returns percentiles of the time between commit and at, in milliseconds.
func (j *journey) waits(at map[uuid.UUID]time.Time) (p50, p99 float64) {
	var l load.Load
	for id, committed := range j.committed {
		l.Waits = append(l.Waits, at[id].Sub(committed))
	}
	slices.Sort(l.Waits)
	return milliseconds(l.Percentile(0.5)), milliseconds(l.Percentile(0.99))
}

// startRelay starts a relay, and returns a function that stores messages for it.
type startRelay func(context.Context, *journey) (store write, stop func() error)

// travel commits messages at a steady rate and follows them.
func (d *drain) travel(ctx context.Context, rate int, length time.Duration, start startRelay) sample {
	j := &journey{committed: map[uuid.UUID]time.Time{}, confirmed: map[uuid.UUID]time.Time{}, arrived: map[uuid.UUID]time.Time{}}
	conn := must(amqp.Dial(d.url))
	defer conn.Close()
	ch := must(conn.Channel())
	deliveries := must(ch.Consume(d.queue, "", true, false, false, false, nil))
	go func() {
		for delivery := range deliveries {
			if id, err := uuid.Parse(delivery.MessageId); err == nil {
				j.note(j.arrived, id)
			}
		}
	}()
	store, stop := start(ctx, j)
	n := max(1, int(float64(rate)*length.Seconds()))
	err := d.commitSteadily(ctx, n, time.Second/time.Duration(rate), store, j)
	for patience := time.Now().Add(20 * time.Second); err == nil && !j.complete(n); {
		if time.Now().After(patience) {
			err = fmt.Errorf("not all of %d messages were confirmed and arrived", n)
		}
		time.Sleep(5 * time.Millisecond)
	}
	check(errors.Join(err, stop()))
	s := make(sample, 4)
	s[colConfirm50], s[colConfirm99] = j.waits(j.confirmed)
	s[colArrival50], s[colArrival99] = j.waits(j.arrived)
	return s
}

// commitSteadily spreads the commits over a few writers, so that a slow commit delays no other.
func (d *drain) commitSteadily(ctx context.Context, n int, every time.Duration, store write, j *journey) error {
	manager, err := txretry.New(d.pool, txretry.Config{})
	if err != nil {
		return err
	}
	turns := make(chan struct{}, n)
	const writers = 4
	errs := make([]error, writers)
	var writing sync.WaitGroup
	for w := range writers {
		writing.Go(func() {
			for range turns {
				m := d.message()
				m.ID, m.ContentType = ids.New(), "application/json"
				if errs[w] = manager.Do(ctx, func(ctx context.Context, tx pgx.Tx) error { return store(ctx, tx, m) }); errs[w] != nil {
					return
				}
				j.note(j.committed, m.ID)
			}
		})
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for range n {
		<-tick.C
		turns <- struct{}{}
	}
	close(turns)
	writing.Wait()
	return errors.Join(errs...)
}

// noting is a publisher that records confirms in a journey.
type noting struct {
	*outboxamqp.Publisher
	journey *journey
}

func (p noting) Publish(ctx context.Context, m driver.Message, done func(error)) {
	p.Publisher.Publish(ctx, m, func(err error) {
		if err == nil {
			p.journey.note(p.journey.confirmed, m.ID)
		}
		done(err)
	})
}

// startHoldfast starts a relay that is woken within the process, or through the database.
func (d *drain) startHoldfast(notify bool) startRelay {
	return func(ctx context.Context, j *journey) (write, func() error) {
		publisher := must(outboxamqp.NewPublisher(outboxamqp.Dial(d.url, amqp.Config{}), outboxamqp.Config{Logger: quiet}))
		store := must(outboxpgx.New(d.pool, outboxpgx.Config{PollOnly: !notify, Logger: quiet}))
		relay := must(outbox.NewRelay(store, noting{publisher, j}, outbox.RelayConfig{Logger: quiet}))
		writer := store
		if notify { // a store without the relay, as in another process
			writer = must(outboxpgx.New(d.pool, outboxpgx.Config{Logger: quiet}))
		}
		stop := beside(ctx, relay.Run)
		untilReady(ctx, publisher.Ready)
		untilReady(ctx, relay.Ready)
		return writer.Write, stop
	}
}

// startRaw starts the minimal relay: notified inside the business transaction, it reads all
// messages, publishes, awaits the confirms and deletes.
func (d *drain) startRaw(ctx context.Context, j *journey) (write, func() error) {
	listening := must(d.pool.Acquire(ctx))
	must(listening.Exec(ctx, "LISTEN raw_outbox"))
	conn := must(amqp.Dial(d.url))
	ch := must(conn.Channel())
	check(ch.Confirm(false))
	stop := beside(ctx, func(ctx context.Context) error {
		for {
			if _, err := listening.Conn().WaitForNotification(ctx); err != nil {
				return nil // the end of ctx
			}
			if err := d.relayRaw(context.WithoutCancel(ctx), ch, j); err != nil {
				return err
			}
		}
	})
	store := func(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
		_, err := tx.Exec(ctx, "WITH i AS (INSERT INTO raw_outbox VALUES ($1, $2)) SELECT pg_notify('raw_outbox', '')", msgs[0].ID, msgs[0].Body)
		return err
	}
	return store, func() error {
		err := stop()
		_ = listening.Conn().Close(context.WithoutCancel(ctx)) // its wait was interrupted
		listening.Release()
		return errors.Join(err, conn.Close())
	}
}

func (d *drain) relayRaw(ctx context.Context, ch *amqp.Channel, j *journey) error {
	type row struct {
		ID   uuid.UUID
		Body []byte
	}
	rows, err := d.pool.Query(ctx, "SELECT id, body FROM raw_outbox ORDER BY id LIMIT 100")
	if err != nil {
		return err
	}
	messages, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil {
		return err
	}
	var sent []uuid.UUID
	var confirms []*amqp.DeferredConfirmation
	for _, m := range messages {
		c, err := ch.PublishWithDeferredConfirm("", d.queue, true, false, amqp.Publishing{DeliveryMode: amqp.Persistent, MessageId: m.ID.String(), Body: m.Body})
		if err != nil {
			return err
		}
		sent, confirms = append(sent, m.ID), append(confirms, c)
	}
	for i, c := range confirms {
		if !c.Wait() {
			return errNotConfirmed
		}
		j.note(j.confirmed, sent[i])
	}
	_, err = d.pool.Exec(ctx, "DELETE FROM raw_outbox WHERE id = ANY($1)", sent)
	return err
}
