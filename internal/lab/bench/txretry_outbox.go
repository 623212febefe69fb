package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
)

const (
	plainInsert = "plain, INSERT by hand"
	plainWriter = "plain, outboxpgx.Store"
	oursInsert  = "txretry, AtCommit INSERT"
	oursWriter  = "txretry, outboxpgx.Store"
)

// benchOutboxWrite runs {SELECT FOR UPDATE, UPDATE, outbox write}: five round
// trips in plain code whose BEGIN is one, four in ours. Nobody contends.
func benchOutboxWrite(ctx context.Context, b *bench) {
	pool, manager := accountBank(ctx, b)
	store := must(outboxpgx.New(pool, outboxpgx.Config{PollOnly: true}))
	check(store.Migrate(ctx))
	r := compareWrites(ctx, b, "loopback", pool, manager, store)
	b.atLeast(1.04, r.ratio(oursWriter, plainInsert), "x plain five trips with INSERT by hand, loopback")

	const trip = 2 * time.Millisecond
	far := b.far(ctx, pool, trip)
	printTrip(ctx, b, far)
	farManager := must(txretry.New(far, txretry.Config{}))
	r = compareWrites(ctx, b, fmt.Sprintf("%v more per trip", trip), far, farManager, store)
	b.atLeast(1.2, r.ratio(oursWriter, plainInsert), fmt.Sprintf("x plain five trips with INSERT by hand, %v more per trip", trip))
}

// far returns a pool for the same tables behind a slow link.
func (b *bench) far(ctx context.Context, pool *pgxpool.Pool, trip time.Duration) *pgxpool.Pool {
	cfg := pool.Config()
	link := newSlowLink(fmt.Sprintf("%s:%d", cfg.ConnConfig.Host, cfg.ConnConfig.Port), trip/2)
	b.atEnd(link.Close)
	cfg.ConnConfig.Host, cfg.ConnConfig.Port = link.addr().IP.String(), uint16(link.addr().Port)
	cfg.ConnConfig.Fallbacks = nil
	return b.pool(ctx, cfg)
}

// printTrip shows what a trip costs on the slow link, timers and scheduling included.
func printTrip(ctx context.Context, b *bench, pool *pgxpool.Pool) {
	var trips []float64
	for range 50 {
		start := time.Now()
		check(pool.Ping(ctx))
		trips = append(trips, milliseconds(time.Since(start)))
	}
	_, err := fmt.Fprintf(b.out, "\none empty trip over the slow link: %.2f ms\n", spreadOf(trips).median)
	check(err)
}

func compareWrites(ctx context.Context, b *bench, where string, pool *pgxpool.Pool, manager *txretry.Manager, store *outboxpgx.Store) results {
	plain, do := oneTrip(pool, nil), managed(manager)
	t := table{
		title:   fmt.Sprintf("txretry, SELECT FOR UPDATE, UPDATE, outbox write, goroutines: 8, %s", where),
		columns: []column{{name: "tx/s"}, {name: "p50 ms", decimals: 2}},
		prepare: func(ctx context.Context) error {
			_, err := pool.Exec(ctx, "TRUNCATE holdfast_outbox")
			return errors.Join(err, resetAccounts(ctx, pool))
		},
		yardsticks: []string{plainInsert, plainWriter},
		contenders: []contender{
			{plainInsert, writeLoad(plain, insertNow)},
			{plainWriter, writeLoad(plain, store.Write)},
			{oursInsert, writeLoad(do, insertAtCommit)},
			{oursWriter, writeLoad(do, store.Write)},
		},
	}
	return b.measure(ctx, t)
}

// write stores one message in the transaction.
type write func(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error

const insertSQL = `INSERT INTO holdfast_outbox (id, lane, name, body, content_type) VALUES ($1, 0, $2, $3, $4)`

func insertNow(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
	m := msgs[0]
	_, err := tx.Exec(ctx, insertSQL, m.ID, m.Name, m.Body, m.ContentType)
	return err
}

func insertAtCommit(_ context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
	m := msgs[0]
	if !txretry.AtCommit(tx, insertSQL, m.ID, m.Name, m.Body, m.ContentType) {
		return errors.New("not a handle of txretry")
	}
	return nil
}

func writeLoad(w way, store write) func(ctx context.Context, length time.Duration) sample {
	return func(ctx context.Context, length time.Duration) sample {
		l, err := load.Drive(ctx, 8, length, func(ctx context.Context, worker int) error {
			id := ownAccount(worker)
			return w(ctx, id, func(ctx context.Context, tx pgx.Tx) error { return changeAndTell(ctx, tx, id, store) })
		})
		check(err)
		return sample{l.Rate, milliseconds(l.Percentile(0.5))}
	}
}

func changeAndTell(ctx context.Context, tx pgx.Tx, id int, store write) error {
	var v int64
	if err := tx.QueryRow(ctx, "SELECT v FROM account WHERE id = $1 FOR UPDATE", id).Scan(&v); err != nil {
		return err
	}
	if err := addToAccount(ctx, tx, id); err != nil {
		return err
	}
	m, err := outbox.NewMessage("account.changed", map[string]int64{"account": int64(id), "v": v + 1})
	if err != nil {
		return err
	}
	return store(ctx, tx, m)
}
