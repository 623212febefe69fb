package outboxpgx_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

func TestDedupKeysRunOut(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	short, err := outboxpgx.New(f.pool, outboxpgx.Config{DedupRetention: time.Millisecond})
	must(t, err)
	once := func(w *outboxpgx.Store, key string) (first bool) {
		t.Helper()
		must(t, f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) (err error) {
			_, first, err = w.WriteOnce(ctx, tx, key, outbox.Message{Name: "a", Body: []byte("1")})
			return err
		}))
		return first
	}
	once(short, "taken over")
	once(short, "pruned")
	_, err = f.pool.Exec(t.Context(), `SELECT pg_sleep(0.002)`)
	must(t, err)
	if !once(f.store, "taken over") || once(f.store, "taken over") {
		t.Error("a key that ran out is not free, or not taken again")
	}
	_, err = f.store.Prune(t.Context())
	must(t, err)
	rows, _ := f.pool.Query(t.Context(), `SELECT key FROM holdfast_outbox_dedup`) // CollectRows returns its error
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	if len(keys) != 1 || keys[0] != "taken over" {
		t.Errorf("keys after Prune: %v", keys)
	}
}
