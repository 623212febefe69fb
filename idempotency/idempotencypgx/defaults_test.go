package idempotencypgx_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// ends checks how much is left until a time in the table's one row, which was set a moment ago: less is only what a
// busy machine takes.
func ends(t *testing.T, pool *pgxpool.Pool, column string, want time.Duration) {
	t.Helper()
	var left time.Duration
	err := pool.QueryRow(t.Context(), `SELECT `+column+` - clock_timestamp() FROM holdfast_idempotency`).Scan(&left)
	if err != nil || left > want || left < want-15*time.Second {
		t.Errorf("%s ends in %v, %v; want %v", column, left, err, want)
	}
}

// A lease lasts 30 s and a record 48 h.
func TestDefaultTimes(t *testing.T) {
	t.Parallel()
	t.Run("store", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t)
		store, c := newStore(t, pool, idempotencypgx.Config{}), newClaim()
		if out, err := store.Begin(t.Context(), c); err != nil || out.Lease != 30*time.Second {
			t.Fatalf("Begin = %+v, %v", out, err)
		}
		ends(t, pool, "lease_until", 30*time.Second)
		must(t, store.Extend(t.Context(), c))
		ends(t, pool, "lease_until", 30*time.Second)
		must(t, store.Complete(t.Context(), c, driver.Response{Status: 200}))
		ends(t, pool, "expires_at", 48*time.Hour)
	})
	t.Run("long work", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t)
		store, c := newStore(t, pool, idempotencypgx.Config{}), newClaim()
		if _, err := store.Begin(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		if _, err := pool.Exec(t.Context(), `UPDATE holdfast_idempotency SET expires_at = expires_at - interval '1 hour'`); err != nil {
			t.Fatal(err)
		}
		must(t, store.Complete(t.Context(), c, driver.Response{Status: 200}))
		ends(t, pool, "expires_at", 48*time.Hour-30*time.Second)
	})
	t.Run("records", func(t *testing.T) {
		t.Parallel()
		pool := newPool(t)
		records := newRecords(t, pool)
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			return records.Insert(t.Context(), tx, pgxdriver.Record{Key: driver.Key(idempotency.NewKey()), Response: driver.Response{Status: 200}})
		})
		must(t, err)
		ends(t, pool, "expires_at", 48*time.Hour)
	})
}

// silent records never answer.
type silent struct{ pgxdriver.Records }

func (silent) Lookup(ctx context.Context, _ driver.Key) (pgxdriver.Record, bool, error) {
	<-ctx.Done()
	return pgxdriver.Record{}, false, ctx.Err()
}

func TestDefaultsOfDo(t *testing.T) {
	t.Parallel()
	run := func(t *testing.T, records pgxdriver.Records, size int) error {
		t.Helper()
		store, err := idempotencypgx.New(txretrytest.New(txretrytest.Config{}), idempotencypgx.Config{Gate: idempotencytest.NewStore(), Records: records})
		must(t, err)
		_, _, err = store.DoKey(t.Context(), goodKey, nil, func(context.Context, pgx.Tx) (idempotency.Response, error) {
			if size == 0 {
				return idempotency.Response{}, context.Canceled
			}
			return idempotency.Response{Status: 200, Body: make([]byte, size)}, nil
		})
		return err
	}
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		if err := run(t, silent{}, 0); err == nil || time.Since(start) != 10*time.Second {
			t.Errorf("%v after %v; want an error after 10 s", err, time.Since(start))
		}
	})
	for size, unavailable := range map[int]bool{1 << 20: false, 1<<20 + 1: true} {
		records := &one{}
		if err := run(t, records, size); err != nil {
			t.Error(err)
		}
		if records.rec.Key != goodKey || records.rec.Response.Unavailable() != unavailable {
			t.Errorf("%d bytes: record of %q, a tombstone %v", size, records.rec.Key, records.rec.Response.Unavailable())
		}
	}
}

// one holds the last record.
type one struct {
	pgxdriver.Records
	rec pgxdriver.Record
}

func (o *one) Insert(_ context.Context, _ pgx.Tx, rec pgxdriver.Record) error {
	o.rec = rec
	return nil
}

const goodKey = "a0eebc999c0b4ef8bb6d6bb9bd380a11"
