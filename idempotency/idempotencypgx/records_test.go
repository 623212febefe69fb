package idempotencypgx_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// What a transaction has stored counts, also while the claim of the key, a row of its own, is still held.
func TestLookFindsTheRecordOfATransaction(t *testing.T) {
	t.Parallel()
	fake, err := idempotencytest.New(txretrytest.New(txretrytest.Config{}), idempotencypgx.Config{})
	must(t, err)
	pool := newPool(t)
	for name, store := range map[string]*idempotencypgx.Store{
		"alone": newAlone(t, pool, idempotencypgx.Config{}), "lease": newStore(t, pool, idempotencypgx.Config{}), "fake": fake,
	} {
		key := idempotency.NewKey()
		var within driver.Known
		inFlight, exact := -1, false
		_, _, err := store.DoKey(t.Context(), key, []string{"a request"}, func(ctx context.Context, _ pgx.Tx) (resp idempotency.Response, err error) {
			within, err = store.Look(context.WithoutCancel(ctx), driver.Key(key))
			if err == nil {
				inFlight, exact, err = store.InFlight(context.WithoutCancel(ctx))
			}
			return idempotency.Response{Status: 201, Body: []byte("made")}, err
		})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if within.State == driver.Completed {
			t.Errorf("%s: before the commit the key is done", name)
		}
		if held := within.State == driver.InProgress; name != "fake" && held != (inFlight == 1) || !exact {
			t.Errorf("%s: %d claims are in flight, %+v", name, inFlight, within)
		}
		if n, exact, err := store.InFlight(t.Context()); n != 0 || !exact || err != nil {
			t.Errorf("%s: %d claims are in flight at the end, %v", name, n, err)
		}
		known, err := store.Look(t.Context(), driver.Key(key))
		if err != nil || known.State != driver.Completed || known.Response.Status != 201 || string(known.Response.Body) != "made" {
			t.Errorf("%s: Look = %+v, %v", name, known, err)
		}
		if known.Fingerprint.Sum == "" || name != "fake" && (known.Left <= 0 || known.Since.IsZero()) {
			t.Errorf("%s: Look does not tell whose it is, or since when: %+v", name, known)
		}
	}
}

// A SELECT would find nothing while the other transaction is committing.
func TestResolveWaitsForAnOpenTransaction(t *testing.T) {
	t.Parallel()
	for name, commit := range map[string]bool{"commits": true, "rolls back": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			records := newRecords(t, pool)
			rec := pgxdriver.Record{Key: driver.Key(idempotency.NewKey()), Token: "t", Response: driver.Response{Status: 200}}
			tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
			must(t, err)
			defer func() { _ = tx.Rollback(context.Background()) }()
			if err := records.Insert(t.Context(), tx, rec); err != nil { // a raw tx: inserted at once
				t.Fatal(err)
			}

			type answer struct {
				found bool
				err   error
			}
			resolved := make(chan answer, 1)
			go func() {
				_, found, err := records.Resolve(t.Context(), rec.Key)
				resolved <- answer{found, err}
			}()
			testenv.Eventually(t, func() error { return waiting(t, pool) })
			select {
			case a := <-resolved:
				t.Fatalf("Resolve did not wait: %+v", a)
			default:
			}
			if commit {
				err = tx.Commit(t.Context())
			} else {
				err = tx.Rollback(t.Context())
			}
			if a := <-resolved; err != nil || a.err != nil || a.found != commit {
				t.Errorf("Resolve = %+v (end of transaction: %v); want found %v", a, err, commit)
			}
		})
	}
}
