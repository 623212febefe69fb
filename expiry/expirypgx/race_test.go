package expirypgx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func eventually(t *testing.T, check func() error) {
	t.Helper()
	testenv.Eventually(t, 20*time.Second, check)
}

func announceAll(b *backend) func(context.Context, pgx.Tx, []expiry.Row) error {
	return func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		for _, row := range rows {
			if err := b.Announce(ctx, tx, row); err != nil {
				return err
			}
		}
		return nil
	}
}

// Four sweepers race with clients who confirm and extend holds that are about to
// expire, and each sweeper is replaced a few times. Every hold must end in one
// state, with one event if it expired and none if it was confirmed.
func TestSweepersRaceWithConfirmAndExtend(t *testing.T) {
	t.Parallel()
	const holds, clients, sweepers = 4000, 4, 4
	b := newBackend(t)
	b.exec(t, `INSERT INTO holds (id, status, expires_at)
		SELECT 'hold-' || n, 'held', now() + random() * interval '2 seconds' FROM generate_series(1, $1) n`, holds)

	ctx, cancel := context.WithCancel(t.Context())
	var sweeping sync.WaitGroup
	for range sweepers {
		sweeping.Go(func() {
			for ctx.Err() == nil { // stopped and started again all the time
				cfg := quiet()
				cfg.BatchSize, cfg.MinPause = 50, 10*time.Millisecond
				sw, err := expiry.NewSweeper(b.Store(t, announceAll(b)), cfg)
				if err != nil {
					t.Error(err)
					return
				}
				shift, end := context.WithTimeout(ctx, time.Duration(100+rand.IntN(400))*time.Millisecond)
				if err := sw.Run(shift); err != nil {
					t.Error(err)
				}
				end()
			}
		})
	}

	var confirmed, extended atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for range 1500 {
				id := fmt.Sprint("hold-", 1+rand.IntN(holds))
				sql, count := "UPDATE holds SET status = 'confirmed' WHERE id = $1 AND status = 'held' AND expires_at > now()", &confirmed
				if rand.IntN(2) == 0 {
					sql, count = "UPDATE holds SET expires_at = expires_at + interval '300 ms' WHERE id = $1 AND status = 'held' AND expires_at > now()", &extended
				}
				tag, err := b.pool.Exec(t.Context(), sql, id)
				if err != nil {
					t.Error(err)
					return
				}
				count.Add(tag.RowsAffected())
			}
		})
	}
	wg.Wait()
	eventually(t, func() error {
		var left int
		b.scan(t, &left, "SELECT count(*) FROM holds WHERE status = 'held'")
		if left > 0 {
			return fmt.Errorf("%d are still held", left)
		}
		return nil
	})
	cancel()
	sweeping.Wait()

	var wrong, expired, sold, events int64
	b.scan(t, &expired, "SELECT count(*) FROM holds WHERE status = 'expired'")
	b.scan(t, &sold, "SELECT count(*) FROM holds WHERE status = 'confirmed'")
	b.scan(t, &events, "SELECT count(*) FROM events")
	b.scan(t, &wrong, `SELECT count(*) FROM holds LEFT JOIN (SELECT hold_id, count(*) n FROM events GROUP BY 1) e ON hold_id = id
		WHERE coalesce(n, 0) <> CASE status WHEN 'expired' THEN 1 ELSE 0 END`)
	var early int64
	b.scan(t, &early, "SELECT count(*) FROM events JOIN holds ON id = hold_id WHERE at < expires_at")
	if early != 0 {
		t.Errorf("%d holds expired before their deadline", early)
	}
	if wrong != 0 || events != expired || sold != confirmed.Load() || expired+sold != holds {
		t.Errorf("%d holds: %d expired with %d events, %d confirmed (clients count %d), %d with a wrong number of events",
			holds, expired, events, sold, confirmed.Load(), wrong)
	}
	if confirmed.Load() == 0 || extended.Load() == 0 || expired == 0 {
		t.Errorf("no race: %d confirmed, %d extended, %d expired", confirmed.Load(), extended.Load(), expired)
	}
}

// A sweeper that loses its database goes on when it is back.
func TestSweeperOutlivesALostDatabase(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	proxy := testenv.NewProxy(t, url)
	direct := &backend{pool: pgtest.Pool(t, url, 2)}
	direct.exec(t, schema)
	b := &backend{pool: pgtest.Pool(t, proxy.URL(), 4)}
	cfg := quiet()
	cfg.MaxBackoff = 200 * time.Millisecond
	sw, err := expiry.NewSweeper(b.Store(t, announceAll(b)), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- sw.Run(ctx) }()
	eventually(t, func() error { return sw.Ready(ctx) })

	for round := range 3 {
		id := fmt.Sprint("hold-", round)
		proxy.Cut()
		sw.Wake(time.Time{})
		eventually(t, func() error {
			if sw.Ready(ctx) == nil {
				return errors.New("ready without a database")
			}
			return nil
		})
		direct.Put(t, id, "held", -time.Second)
		proxy.Heal()
		eventually(t, func() error {
			if got := direct.State(t, id); got != "expired" {
				return fmt.Errorf("hold is %s", got)
			}
			return sw.Ready(ctx)
		})
		if n := direct.Announced(t, id); n != 1 {
			t.Errorf("the hold was announced %d times", n)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run returned %v", err)
	}
}
