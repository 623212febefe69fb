package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// keyed makes messages 0 to n-1 of each key, mixed over the keys.
func keyed(keys, n int) []outbox.Message {
	var msgs []outbox.Message
	for i := range n {
		for k := range keys {
			msgs = append(msgs, outbox.Message{Name: "order.placed", Key: "key-" + strconv.Itoa(k), Body: []byte(strconv.Itoa(i))})
		}
	}
	return msgs
}

// checkLedger looks at what arrived: everything, and the first arrivals of each key in order.
func checkLedger(t *testing.T, received []driver.Message, keys, n int) (duplicates int) {
	t.Helper()
	next := map[string]int{}
	for _, m := range received {
		i, err := strconv.Atoi(string(m.Body))
		must(t, err)
		switch {
		case i == next[m.Key]:
			next[m.Key]++
		case i < next[m.Key]:
			duplicates++
		default:
			t.Fatalf("%s: %d arrived, want %d first", m.Key, i, next[m.Key])
		}
	}
	if len(next) != keys {
		t.Errorf("%d of %d keys arrived", len(next), keys)
	}
	for key, got := range next {
		if got != n {
			t.Errorf("%s: %d of %d arrived", key, got, n)
		}
	}
	return duplicates
}

// untilEmpty does not ask Stats, which believes the floors.
func (f *fixture) untilEmpty(t *testing.T, patience time.Duration) {
	t.Helper()
	testenv.Eventually(t, func() error {
		var left int
		err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM holdfast_outbox WHERE published_at IS NULL`).Scan(&left)
		if err == nil && left > 0 {
			err = fmt.Errorf("%d left", left)
		}
		return err
	})
}

// run starts relays, and stop ends them.
func run(t *testing.T, relays ...*outbox.Relay) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, r := range relays {
		wg.Go(func() {
			if err := r.Run(ctx); err != nil {
				t.Errorf("Run: %v", err)
			}
		})
	}
	return func() { cancel(); wg.Wait() }
}

func drain(t *testing.T, r *outbox.Relay, want int) {
	t.Helper()
	report, err := r.Drain(t.Context(), outbox.Bounds{})
	must(t, err)
	if report.Published != want {
		t.Errorf("published %d, want %d", report.Published, want)
	}
}

func TestKilledBetweenPublishAndSettle(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.store.Claims(driver.Lanes, 0)
	f.write(t, keyed(5, 10)...)
	publisher := outboxtest.NewPublisher()
	// A relay that publishes a part of what it claimed and is gone.
	batch, err := f.store.Claim(t.Context(), driver.Claim{Limit: 500, Lease: 500 * time.Millisecond})
	must(t, err)
	if len(batch.Messages) == 0 {
		t.Fatal("nothing claimed")
	}
	for _, m := range batch.Messages[:len(batch.Messages)/2] {
		publisher.Publish(t.Context(), m, func(error) {})
	}
	stop := run(t, f.relay(t, publisher, outbox.RelayConfig{PollInterval: 20 * time.Millisecond}))
	defer stop()
	f.untilEmpty(t, testenv.Patience)
	stop()
	if got := checkLedger(t, publisher.Received(), 5, 10); got != len(batch.Messages)/2 {
		t.Errorf("%d duplicates, want those published before the crash: %d", got, len(batch.Messages)/2)
	}
	if settled, err := f.store.Settle(t.Context(), batch, nil); err != nil || len(settled.Stale) != len(batch.Leases) {
		t.Errorf("the relay that came back: %d of %d leases stale, %v", len(settled.Stale), len(batch.Leases), err)
	}
}

// The host of a relay is gone in the middle of a claim, and nobody tells the server.
func TestVanishedHostFreesItsLanes(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	f.write(t, keyed(5, 10)...)
	vanished, err := f.pool.Begin(t.Context())
	must(t, err)
	defer vanished.Rollback(context.WithoutCancel(t.Context()))
	_, err = vanished.Exec(t.Context(), outboxpgx.Statement("claim"), int64(7), int64(1_000_000), driver.Lanes, []string{}, 500, true, []int64{})
	must(t, err)
	publisher := outboxtest.NewPublisher()
	defer run(t, f.relay(t, publisher, outbox.RelayConfig{PollInterval: 50 * time.Millisecond}))()
	f.untilEmpty(t, testenv.Patience)
	checkLedger(t, publisher.Received(), 5, 10)
}

// After a failover or an adjustment, times of before may lie in the future.
func TestClockSetBackHoldsNoFreeLane(t *testing.T) {
	t.Parallel()
	f := setup(t, outboxpgx.Config{})
	relay := f.relay(t, outboxtest.NewPublisher(), outbox.RelayConfig{})
	f.write(t, keyed(10, 1)...)
	drain(t, relay, 10)
	f.exec(t, `UPDATE holdfast_outbox_lanes SET lease_until = lease_until + interval '1 hour'`)
	f.write(t, keyed(10, 1)...)
	drain(t, relay, 10)
}

func TestPostgresRestart(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "restarts and kills a Postgres")
	server := testenv.Private(t, testenv.Postgres)
	f := setupOn(t, pgtest.Pool(t, server.URL(), 10), outboxpgx.Config{})
	publisher := outboxtest.NewPublisher()
	publisher.Latency(5 * time.Millisecond)
	relay := f.relay(t, publisher, outbox.RelayConfig{
		BatchSize: 100, PollInterval: 50 * time.Millisecond, PublishTimeout: time.Second,
		LeaseTTL: 3 * time.Second, ShutdownTimeout: 5 * time.Second,
	})
	const keys, n = 50, 60
	parts := slices.Collect(slices.Chunk(keyed(keys, n), keys*n/2))
	stop := run(t, relay)
	defer stop()
	for i, fault := range []func() error{
		func() error { return server.Restart(t.Context()) },
		func() error { return errors.Join(server.Kill(), server.Start(t.Context())) },
	} {
		before := len(publisher.Received())
		testenv.Eventually(t, func() error {
			return f.manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return f.store.Write(ctx, tx, parts[i]...) })
		})
		untilReceived(t, publisher, before+300)
		must(t, fault())
	}
	f.untilEmpty(t, testenv.Patience)
	stop()
	duplicates := checkLedger(t, publisher.Received(), keys, n)
	t.Logf("%d duplicates over two crashes", duplicates)
}

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
			untilReceived(t, publisher, 200)
			testenv.Eventually(t, func() error { return f.emptyNow(t) }) // what is published is pruned
			stop()
		})
	}
}
