package chunk_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/holdfast-go/holdfast/internal/chunk"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

const deleteOld = `DELETE FROM rows WHERE n IN (SELECT n FROM rows WHERE n <= $1 ORDER BY n LIMIT $2 FOR UPDATE SKIP LOCKED)`

// Several processes at once, in a database whose default would make them fail.
func TestDelete(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t, pgtest.URL(t)+"&default_transaction_isolation=serializable", 8)
	if _, err := pool.Exec(t.Context(), `CREATE TABLE rows AS SELECT n FROM generate_series(1, 1000) n`); err != nil {
		t.Fatal(err)
	}
	var deleted atomic.Int64
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			n, err := chunk.Delete(t.Context(), pool, 10, deleteOld, 900)
			if err != nil {
				t.Error(err)
			}
			deleted.Add(n)
		})
	}
	wg.Wait()
	var left int64
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM rows`).Scan(&left); err != nil {
		t.Fatal(err)
	}
	if left != 100 || deleted.Load() != 900 {
		t.Errorf("%d deleted, %d left", deleted.Load(), left)
	}
}

func TestDeleteEnds(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := chunk.Delete(ctx, pool, 10, deleteOld, 900); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("Delete = %d, %v", n, err)
	}
}
