package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/lab/load"
)

const (
	sequential = "one connection, in sequence"
	inTurn     = "txretry, SerialKey"
	combined   = "txretry, SerialKey, Combine: 32"
	byHand     = "one connection, 16 calls a COMMIT"
)

// Columns of the contended tables.
const (
	colRate = iota
	colAttempts
	colP99
	colWorst
	colShare
	colGaveUp
)

// benchContended has 32 goroutines read and then write few accounts.
func benchContended(ctx context.Context, b *bench) {
	pool, manager := accountBank(ctx, b)
	for _, hot := range []int{1, 10} {
		under := func(w way, goroutines int) func(context.Context, time.Duration) sample {
			return func(ctx context.Context, length time.Duration) sample {
				return contend(ctx, pool, w, goroutines, hot, length)
			}
		}
		t := table{
			title: fmt.Sprintf("txretry, read then write %d hot rows, goroutines: 32", hot),
			columns: []column{
				colRate:     {name: "commits/s"},
				colAttempts: {name: "attempts/commit", decimals: 3},
				colP99:      {name: "p99 ms", decimals: 1},
				colWorst:    {name: "worst ms", decimals: 1, most: true},
				colShare:    {name: "worst/fair share", decimals: 1, most: true},
				colGaveUp:   {name: "exhausted", most: true},
			},
			prepare:    func(ctx context.Context) error { return resetAccounts(ctx, pool) },
			yardsticks: []string{sequential},
			contenders: []contender{
				{sequential, under(oneTrip(pool, nil), 1)},
				{"plain loop, no wait", under(oneTrip(pool, nil), 32)},
				{"plain loop, full jitter", under(oneTrip(pool, fullJitter), 32)},
				{"one-trip begin, a mutex per row", under(oneAtATime(oneTrip(pool, nil), hot), 32)},
				{inTurn, under(managedInTurn(manager, 0), 32)},
				{ours, under(managed(manager), 32)},
				{combined, under(managedInTurn(manager, 32), 32)},
			},
		}
		if hot == 1 {
			t.contenders = append(t.contenders, contender{byHand, func(ctx context.Context, length time.Duration) sample {
				return shareCommits(ctx, pool, length)
			}})
		}
		r := b.measure(ctx, t)
		b.atLeast(0.8, r.ratio(inTurn, sequential), fmt.Sprintf("of the sequential rate, SerialKey, %d rows", hot))
		b.atMost(2, r.column(inTurn, colShare), fmt.Sprintf("worst wait / the queue's fair share, SerialKey, %d rows", hot))
		b.atMost(0, r.column(inTurn, colGaveUp), fmt.Sprintf("exhausted calls, SerialKey, %d rows", hot))
		if hot == 1 {
			b.atLeast(4, r.ratio(combined, sequential), "x the sequential rate, SerialKey and Combine, 1 row")
			b.atLeast(0.8, r.ratio(combined, byHand), "of 16 calls a COMMIT by hand, SerialKey and Combine, 1 row")
		}
	}
}

// oneAtATime is the least that a queue per account can cost.
func oneAtATime(w way, hot int) way {
	turns := make([]sync.Mutex, 1+hot)
	return func(ctx context.Context, account int, fn work) error {
		turns[account].Lock()
		defer turns[account].Unlock()
		return w(ctx, account, fn)
	}
}

// shareCommits is the limit of what a shared COMMIT can give: one connection, without callers that wait for each other.
func shareCommits(ctx context.Context, pool *pgxpool.Pool, length time.Duration) sample {
	const calls = 16 // of 32 goroutines, as many as stand in line while the others commit
	transaction := oneTrip(pool, nil)
	l := must(load.Drive(ctx, 1, length, func(ctx context.Context, _ int) error {
		return transaction(ctx, 1, func(ctx context.Context, tx pgx.Tx) error {
			for range calls {
				if err := readThenWrite(ctx, tx, 1); err != nil {
					return err
				}
			}
			return nil
		})
	}))
	worst := milliseconds(l.Percentile(1))
	return sample{colRate: calls * l.Rate, colAttempts: 1, colP99: milliseconds(l.Percentile(0.99)), colWorst: worst, colShare: 1, colGaveUp: 0}
}

// contend makes one run and checks that no update was lost.
func contend(ctx context.Context, pool *pgxpool.Pool, w way, goroutines, hot int, length time.Duration) sample {
	queues := make([]queue, hot)
	var attempts atomic.Int64
	l := must(load.Drive(ctx, goroutines, length, func(ctx context.Context, _ int) error {
		account := rand.IntN(hot)
		queues[account].join()
		defer queues[account].leave()
		return w(ctx, 1+account, func(ctx context.Context, tx pgx.Tx) error {
			attempts.Add(1)
			return readThenWrite(ctx, tx, 1+account)
		})
	}))
	var total int
	check(pool.QueryRow(ctx, "SELECT sum(v) FROM account").Scan(&total))
	if total != l.Done {
		check(fmt.Errorf("%d commits, but %d updates in the table", l.Done, total))
		return nil
	}
	worst := l.Percentile(1)
	return sample{
		colRate:     l.Rate,
		colAttempts: float64(attempts.Load()) / float64(l.Done),
		colP99:      milliseconds(l.Percentile(0.99)),
		colWorst:    milliseconds(worst),
		colShare:    float64(worst) / float64(fairShare(l.Waits, queues)),
		colGaveUp:   float64(l.GaveUp),
	}
}

func readThenWrite(ctx context.Context, tx pgx.Tx, id int) error {
	var v int64
	if err := tx.QueryRow(ctx, "SELECT v FROM account WHERE id = $1", id).Scan(&v); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, "UPDATE account SET v = $2 WHERE id = $1", id, v+1)
	return err
}

// queue is the callers of one account, whatever order they are served in.
type queue struct {
	present, longest, joined atomic.Int64 // joined sums up how long the queue was for each caller
}

func (q *queue) join() {
	n := q.present.Add(1)
	q.joined.Add(n)
	for longest := q.longest.Load(); n > longest && !q.longest.CompareAndSwap(longest, n); {
		longest = q.longest.Load()
	}
}

func (q *queue) leave() { q.present.Add(-1) }

// fairShare is how long the last caller of the longest queue would wait if all
// took turns of equal length. A mean turn is the sum of all waits over the sum
// of the queue lengths that the callers met: with one row and n callers that
// makes n divided by the rate.
func fairShare(waits []time.Duration, queues []queue) time.Duration {
	var wait time.Duration
	for _, w := range waits {
		wait += w
	}
	var joined, longest int64
	for i := range queues {
		joined += queues[i].joined.Load()
		longest = max(longest, queues[i].longest.Load())
	}
	return time.Duration(float64(wait) / float64(joined) * float64(longest))
}
