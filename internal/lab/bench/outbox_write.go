package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/load"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

const (
	insertByHand = "INSERT by hand"
	writerNoWake = "outboxpgx.Store, no wake-up"
	writerWake   = "outboxpgx.Store, relay beside"
	writerNotify = "outboxpgx.Store, relay elsewhere"
	writerPairs  = 10 // rounds at least, for the goals are narrow
)

// benchWrite is what a message costs the transaction that writes it: an UPDATE and a write,
// in txretry, both sent in as few trips as there can be. No relay takes the messages away,
// for it would take the processor too; some are woken.
func benchWrite(ctx context.Context, b *bench) {
	pool, manager := accountBank(ctx, b)
	stores := map[string]write{insertByHand: insertAtCommit}
	var relays []func(context.Context) error
	for name, of := range map[string]struct {
		cfg   outboxpgx.Config
		woken bool // a relay on this Store
	}{
		writerNoWake: {outboxpgx.Config{PollOnly: true}, false},
		writerWake:   {outboxpgx.Config{PollOnly: true}, true},
		writerNotify: {outboxpgx.Config{Logger: quiet}, false},
		"listener":   {outboxpgx.Config{Logger: quiet}, true},
	} {
		store := must(outboxpgx.New(pool, of.cfg))
		check(store.Migrate(ctx))
		stores[name] = store.Write
		if !of.woken {
			continue
		}
		relay := must(outbox.NewRelay(idleSource{store}, noPublisher{}, outbox.RelayConfig{Logger: quiet}))
		relays = append(relays, relay.Run)
	}
	stop := beside(ctx, relays...)
	for _, goroutines := range []int{1, 32} {
		pairs := *b
		pairs.rounds = max(b.rounds, writerPairs)
		t := table{
			title:      fmt.Sprintf("outbox, price of the write, UPDATE and one message of %d bytes, goroutines: %d", len(body), goroutines),
			columns:    []column{{name: "tx/s"}, {name: "p50 ms", decimals: 2}},
			yardsticks: []string{insertByHand, writerNoWake},
			prepare: func(ctx context.Context) error {
				_, err := pool.Exec(ctx, "TRUNCATE holdfast_outbox")
				return errors.Join(err, resetAccounts(ctx, pool))
			},
		}
		for _, name := range []string{insertByHand, writerNoWake, writerWake, writerNotify} {
			t.contenders = append(t.contenders, contender{name, priced(managed(manager), stores[name], goroutines)})
		}
		r := pairs.measure(ctx, t)
		where := fmt.Sprintf("goroutines: %d", goroutines)
		b.atLeast(0.95, r.ratio(writerNoWake, insertByHand), "of the rate with an INSERT by hand, "+where)
		least := map[int]float64{1: 0.85, 32: 0.95}[goroutines] // one writer shares its processors with the relay that it wakes
		b.atLeast(least, r.ratio(writerWake, writerNoWake), "of the rate without a wake-up, relay beside, "+where)
		b.atLeast(least, r.ratio(writerNotify, writerNoWake), "of the rate without a wake-up, relay elsewhere, "+where)
	}
	check(stop())
}

func priced(w way, store write, goroutines int) func(ctx context.Context, length time.Duration) sample {
	return func(ctx context.Context, length time.Duration) sample {
		l, err := load.Drive(ctx, goroutines, length, func(ctx context.Context, worker int) error {
			id := ownAccount(worker)
			return w(ctx, id, func(ctx context.Context, tx pgx.Tx) error {
				if err := addToAccount(ctx, tx, id); err != nil {
					return err
				}
				m := outbox.Message{ID: ids.New(), Name: "account.changed", Body: body, ContentType: "application/json"}
				return store(ctx, tx, m)
			})
		})
		check(err)
		return sample{l.Rate, milliseconds(l.Percentile(0.5))}
	}
}

// beside runs services until stop is called, which returns their errors.
func beside(ctx context.Context, services ...func(context.Context) error) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	errs := make([]error, len(services))
	var running sync.WaitGroup
	for i, run := range services {
		running.Go(func() { errs[i] = run(ctx) })
	}
	return func() error {
		cancel()
		running.Wait()
		return errors.Join(errs...)
	}
}

// idleSource never has a message, and its relay is woken for those of a Store.
type idleSource struct{ driver.Background }

func (idleSource) Claim(context.Context, driver.Claim) (driver.Batch, error) {
	return driver.Batch{}, nil
}

func (idleSource) Renew(context.Context, []driver.Lease, time.Duration) ([]driver.Lease, error) {
	return nil, nil
}

func (idleSource) Settle(context.Context, driver.Batch, []driver.Settlement) (driver.Settled, error) {
	return driver.Settled{}, nil
}

type noPublisher struct{}

func (noPublisher) Publish(_ context.Context, _ driver.Message, done func(error)) {
	done(errNotConfirmed)
}
