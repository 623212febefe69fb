package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"

	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"

	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/txretrysql"
)

const (
	onPgx        = "on a pgxpool"
	onStdlib     = "database/sql, pgx stdlib"
	onLibPQ      = "database/sql, lib/pq"
	byHandStdlib = "database/sql by hand, pgx stdlib"
)

// benchDatabaseSQL is what the same write costs over database/sql: an UPDATE and a message in a transaction
// of txretry, beside pgx and beside what a user of database/sql writes by hand.
func benchDatabaseSQL(ctx context.Context, b *bench) {
	const goroutines = 8
	pool, manager := accountBank(ctx, b)
	store := must(outboxpgx.New(pool, outboxpgx.Config{PollOnly: true}))
	check(store.Migrate(ctx))
	at := must(url.Parse(pool.Config().ConnString()))
	query := at.Query()
	for name, value := range pool.Config().ConnConfig.RuntimeParams {
		query.Set(name, value)
	}
	at.RawQuery = query.Encode()
	connector := must(pq.NewConnector(at.String()))
	std, libpq := b.open(stdlib.OpenDB(*pool.Config().ConnConfig), goroutines), b.open(sql.OpenDB(connector), goroutines)
	t := table{
		title:      fmt.Sprintf("outbox, a write over database/sql, UPDATE and one message of %d bytes, goroutines: %d", len(body), goroutines),
		columns:    []column{{name: "tx/s"}, {name: "p50 ms", decimals: 2}},
		yardsticks: []string{onPgx, byHandStdlib},
		prepare: func(ctx context.Context) error {
			_, err := pool.Exec(ctx, "TRUNCATE holdfast_outbox")
			return errors.Join(err, resetAccounts(ctx, pool))
		},
		contenders: []contender{{onPgx, priced(managed(manager), store.Write, goroutines)}},
	}
	for _, over := range []struct {
		name string
		db   *sql.DB
	}{{onStdlib, std}, {onLibPQ, libpq}} {
		m := must(txretrysql.New(over.db, pool, txretry.Config{}))
		t.contenders = append(t.contenders, contender{over.name, priced(managed(m), store.Write, goroutines)})
	}
	t.contenders = append(t.contenders, contender{byHandStdlib, priced(inSQL(std), insertNow, goroutines)})
	r := b.measure(ctx, t)
	b.atLeast(0.9, r.ratio(onStdlib, byHandStdlib), "of the rate of the same statements by hand, pgx stdlib")
}

// open has a database end with the run.
func (b *bench) open(db *sql.DB, conns int) *sql.DB {
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	b.atEnd(db.Close)
	return db
}

// inSQL is a transaction without retries.
func inSQL(db *sql.DB) way {
	return func(ctx context.Context, _ int, fn work) error {
		tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable})
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "set local lock_timeout = '8000ms'"); err != nil {
			return err
		}
		if err := fn(ctx, txretrysql.Wrap(tx)); err != nil {
			return err
		}
		return tx.Commit()
	}
}
