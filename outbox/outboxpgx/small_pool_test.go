package outboxpgx_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// Relays, pruning and writers get on with one connection, slowly: none holds one while it waits for another.
func TestSmallPool(t *testing.T) {
	t.Parallel()
	for _, size := range []int32{1, 2} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			cfg := pgtest.New(t).Config()
			cfg.MaxConns = size
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			must(t, err)
			t.Cleanup(pool.Close)
			f := setupOn(t, pool, outboxpgx.Config{Retention: time.Millisecond, PruneInterval: 10 * time.Millisecond})
			publisher := outboxtest.NewPublisher()
			stop := run(t, f.relay(t, publisher, outbox.RelayConfig{BatchSize: 5}), f.relay(t, publisher, outbox.RelayConfig{BatchSize: 5}))
			untilListening(t, f.store)
			for range 10 {
				f.write(t, keyed(5, 4)...)
			}
			testenv.Eventually(t, func() error {
				if n := len(publisher.Received()); n < 200 {
					return fmt.Errorf("%d of 200 messages are published", n)
				}
				return nil
			})
			stop()
		})
	}
}
