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
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

// Four sweepers race with clients who confirm and extend holds that are about to
// expire, and each sweeper is replaced all the time. Every hold must end in one
// state, with one event if it expired and none if it was confirmed.
func TestSweepersRaceWithConfirmAndExtend(t *testing.T) {
	t.Parallel()
	race{holds: 1_000, over: 2 * time.Second, tries: 400}.run(t)
}

func TestSweepersRaceAtSerializable(t *testing.T) {
	t.Parallel()
	race{holds: 300, over: 2 * time.Second, tries: 150, isolation: pgx.Serializable}.run(t)
}

func TestSweepersRace_manyHolds(t *testing.T) {
	testenv.Nightly(t, "100,000 holds")
	race{holds: 100_000, over: 30 * time.Second, tries: 30_000}.run(t)
}

// race is one such race.
type race struct {
	holds     int
	over      time.Duration // in which the first deadlines lie
	tries     int           // of each client to confirm or extend, and more while deadlines come
	isolation pgx.TxIsoLevel
}

func (r race) run(t *testing.T) {
	t.Helper()
	const clients, sweepers = 4, 4
	b := withOutbox(t, pgtest.New(t))
	b.isolation = r.isolation
	b.exec(t, `INSERT INTO holds (id, status, expires_at)
		SELECT 'hold-' || n, 'held', clock_timestamp() + random() * $2::interval FROM generate_series(1, $1) n`, r.holds, r.over)

	begun := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	var sweeping sync.WaitGroup
	write := mustOutbox(t, b.pool)
	for range sweepers {
		sweeping.Go(func() { b.sweepInShifts(ctx, t, write) })
	}
	var confirmed, extended atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for n := 0; n < r.tries || time.Since(begun) < r.over; n++ { // timing: how long the race lasts
				if n >= r.tries {
					time.Sleep(5 * time.Millisecond)
				}
				id := fmt.Sprint("hold-", 1+rand.IntN(r.holds))
				sql, count := confirmSQL, &confirmed
				if rand.IntN(2) == 0 {
					sql, count = extendSQL, &extended
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
	eventually(t, func() error { return b.heldAtMost(t, 0) })
	cancel()
	sweeping.Wait()
	b.audit(t, int64(r.holds), confirmed.Load(), extended.Load())
}

// The statements that the documentation gives.
const (
	confirmSQL = "UPDATE holds SET status = 'confirmed' WHERE id = $1 AND status = 'held' AND expires_at > now()"
	extendSQL  = "UPDATE holds SET expires_at = expires_at + interval '300 ms' WHERE id = $1 AND status = 'held' AND expires_at > now()"
)

// sweepInShifts runs a sweeper that is stopped and replaced all the time.
func (b *backend) sweepInShifts(ctx context.Context, t *testing.T, write emit) {
	t.Helper()
	for ctx.Err() == nil {
		cfg := quiet()
		cfg.BatchSize = 50
		sw, err := expiry.NewSweeper(b.Store(t, write), cfg)
		if err != nil {
			t.Error(err)
			return
		}
		shift, end := context.WithTimeout(ctx, time.Duration(100+rand.IntN(400))*time.Millisecond) // timing: a sweeper ends at a random time
		if err := sw.Run(shift); err != nil {
			t.Error(err)
		}
		end()
	}
}

// audit holds the events against the states at the end.
func (b *backend) audit(t *testing.T, holds, confirmed, extended int64) {
	t.Helper()
	var wrong, early, events int64
	expired, sold := int64(b.count(t, "status = 'expired'")), int64(b.count(t, "status = 'confirmed'"))
	b.scan(t, &events, "SELECT count(*) FROM events")
	b.scan(t, &wrong, outOfStepSQL)
	b.scan(t, &early, "SELECT count(*) FROM events JOIN holds ON id = hold_id WHERE at < expires_at")
	if early != 0 {
		t.Errorf("%d holds expired before their deadline", early)
	}
	if wrong != 0 || events != expired || sold != confirmed || expired+sold != holds {
		t.Errorf("%d holds: %d expired with %d events, %d confirmed (clients count %d), %d with a wrong number of events",
			holds, expired, events, sold, confirmed, wrong)
	}
	if confirmed == 0 || extended == 0 || expired == 0 {
		t.Errorf("no race: %d confirmed, %d extended, %d expired", confirmed, extended, expired)
	}
}

// outOfStepSQL counts the rows whose state does not go with their events.
const outOfStepSQL = `SELECT count(*) FROM holds LEFT JOIN (SELECT hold_id, count(*) n FROM events GROUP BY 1) e ON hold_id = id
	WHERE coalesce(n, 0) <> CASE status WHEN 'expired' THEN 1 ELSE 0 END`

// Sweepers outlive a server that crashes and comes back, in the middle of their
// work, and nothing of it is lost or done twice.
func TestSweepersOutliveARestart(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "restarts a Postgres")
	const holds = 1000 // before each outage
	server := testenv.Private(t, testenv.Postgres)
	b := withOutbox(t, pgtest.Pool(t, server.URL(), 8))
	for range 2 {
		cfg := quiet()
		cfg.BatchSize, cfg.PollInterval = 20, time.Second
		sw := newSweeper(t, b.Store(t, mustOutbox(t, b.pool)), cfg)
		background(t, sw.Run)
	}
	for _, outage := range []func() error{server.Kill, server.Stop} {
		before := b.count(t, "status = 'expired'")
		eventually(t, func() error {
			_, err := b.pool.Exec(t.Context(), `INSERT INTO holds (id, status, expires_at)
				SELECT gen_random_uuid()::text, 'held', clock_timestamp() + random() * interval '3 s' FROM generate_series(1, $1) n`, holds)
			return err
		})
		eventually(t, func() error {
			if b.count(t, "status = 'expired'") <= before+holds/5 {
				return errors.New("the sweepers do not work")
			}
			return nil
		})
		must(t, errors.Join(outage(), server.Start(t.Context())))
		eventually(t, func() error { return b.pool.Ping(t.Context()) })
	}
	eventually(t, func() error { return b.heldAtMost(t, 0) })
	var wrong int
	if b.scan(t, &wrong, outOfStepSQL); wrong > 0 {
		t.Errorf("%d rows are out of step with their events", wrong)
	}
}
