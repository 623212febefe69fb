package idempotencypgx_test

import (
	"fmt"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencypgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A Begin that is like the last one takes one trip. An answer adds no entry to an index.
func TestTripsOfClaims(t *testing.T) {
	t.Parallel()
	direct := newPool(t)
	pool, trips := traced(t, direct)
	store := newStore(t, pool, idempotencypgx.Config{})
	done := newClaim()
	begin := func(claim driver.Claim, want driver.State, most int32) {
		t.Helper()
		before := trips.n.Load()
		if out, err := store.Begin(t.Context(), claim); err != nil || out.State != want {
			t.Errorf("Begin = %+v, %v; want state %v", out, err, want)
		}
		if n := trips.n.Load() - before; n != most {
			t.Errorf("Begin took %d trips, want %d", n, most)
		}
	}
	begin(done, driver.Acquired, 1)
	must(t, store.Complete(t.Context(), done, driver.Response{Status: 201}))
	begin(newClaim(), driver.Acquired, 1)
	begin(done, driver.Completed, 2) // the last one was a first run
	begin(done, driver.Completed, 1)
	begin(newClaim(), driver.Acquired, 2) // the last one was a replay
	begin(newClaim(), driver.Acquired, 1)
	pool.Close() // Postgres counts the rows when the session ends
	testenv.Eventually(t, func() error {
		var hot, all int
		err := direct.QueryRow(t.Context(), `SELECT n_tup_hot_upd, n_tup_upd FROM pg_stat_user_tables WHERE relid = 'holdfast_idempotency'::regclass`).Scan(&hot, &all)
		if err == nil && (hot != 1 || all != 1) {
			err = fmt.Errorf("%d of %d updates left the indexes alone, want 1 of 1", hot, all)
		}
		return err
	})
}
