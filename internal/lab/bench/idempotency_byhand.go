package main

import (
	"context"
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
)

// handKept keeps the answer in the transaction of its effect by bare clients: what any library has to send. It does
// without all that a failure, another request with the key or a replay needs.
type handKept struct{ pool *pgxpool.Pool }

const (
	thingsTable = "CREATE TABLE things (id bigserial PRIMARY KEY, body bytea);"
	byHandTable = `CREATE TABLE kept (key text PRIMARY KEY, body bytea, expires_at timestamptz NOT NULL);
		CREATE INDEX ON kept (expires_at);`
	byHandClaim  = "SELECT WHERE pg_try_advisory_xact_lock(hashtextextended($1, 0))"
	byHandRecord = "INSERT INTO kept (key, body, expires_at) VALUES ($1, $2, now() + interval '2 days')"
)

func (k handKept) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := k.transaction(r.Context(), r.Header.Get(idempotency.Header)); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	reply.ServeHTTP(w, r)
}

// transaction has three round trips: the claim goes with BEGIN, the record with COMMIT.
func (k handKept) transaction(ctx context.Context, key string) error {
	return k.pool.AcquireFunc(ctx, func(c *pgxpool.Conn) error {
		var begin pgx.Batch
		begin.BeginTx(pgx.TxOptions{IsoLevel: pgx.Serializable})
		begin.Queue(rawLockTimeout)
		begin.Queue(byHandClaim, key).Exec(func(tag pgconn.CommandTag) error {
			if tag.RowsAffected() == 0 {
				return errors.New("key is in use")
			}
			return nil
		})
		results := c.SendBatch(ctx, &begin)
		tx := results.Tx()
		err := results.Close()
		if err == nil {
			err = insertThing(ctx, tx)
		}
		if err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		var end pgx.Batch
		end.Queue(byHandRecord, key, body)
		end.Queue("commit")
		return c.SendBatch(ctx, &end).Close()
	})
}
