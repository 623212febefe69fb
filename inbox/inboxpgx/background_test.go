package inboxpgx_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A consumer that runs prunes the entries of its store without being told, also when several
// processes do, and ends with Run.
func TestConsumersPrune(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	left := func() (n int) {
		t.Helper()
		err := pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM holdfast_inbox) + (SELECT count(*) FROM holdfast_inbox_attempts)`).Scan(&n)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	exec(`INSERT INTO holdfast_inbox (consumer, message_id, processed_at)
		SELECT 'a', gen_random_uuid(), now() - interval '9 days' FROM generate_series(1, 3000)`)
	exec(`INSERT INTO holdfast_inbox_attempts (consumer, message_id, replays, attempt, open, updated_at)
		SELECT 'a', gen_random_uuid(), 0, 2, 0, now() - interval '9 days' FROM generate_series(1, 10)`)
	exec(`INSERT INTO holdfast_inbox (consumer, message_id) VALUES ('a', gen_random_uuid())`)
	exec(`INSERT INTO holdfast_inbox (consumer, message_id, processed_at) VALUES ('b', gen_random_uuid(), now() - interval '9 days')`)

	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for range 3 {
		p := newStore(t, newManager(t, pool), "a", inboxpgx.Config{PruneInterval: 50 * time.Millisecond})
		running.Go(func() { p.Background(ctx) })
	}
	testenv.Eventually(t, func() error {
		if n := left(); n != 2 { // the new one, and that of another consumer
			return fmt.Errorf("%d rows are left", n)
		}
		return nil
	})
	stop()
	running.Wait()
}
