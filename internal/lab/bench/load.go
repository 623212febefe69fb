package main

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
)

// errGaveUp is what an operation returns that ended in order and without its
// effect. It is counted, and the load goes on.
var errGaveUp = errors.New("gave up")

// load is what some goroutines did in a while.
type load struct {
	rate   float64         // operations per second, those that ended in time
	done   int             // operations that succeeded, late ones included
	gaveUp int             // operations that ended with errGaveUp
	waits  []time.Duration // of all operations, in ascending order
}

// drive has goroutines repeat op for that long. Operations under way at the end
// are waited for: their durations count, they do not count in the rate. The
// first error ends the load.
func drive(ctx context.Context, goroutines int, length time.Duration, op func(ctx context.Context, worker int) error) (load, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		wg     sync.WaitGroup
		mu     sync.Mutex
		all    load
		inTime int
	)
	end := time.Now().Add(length)
	for worker := range goroutines {
		wg.Go(func() {
			mine, onTime, err := repeat(ctx, end, func() error { return op(ctx, worker) })
			if err != nil {
				cancel(err)
			}
			mu.Lock()
			defer mu.Unlock()
			all.done += mine.done
			all.gaveUp += mine.gaveUp
			all.waits = append(all.waits, mine.waits...)
			inTime += onTime
		})
	}
	wg.Wait()
	all.rate = float64(inTime) / length.Seconds()
	slices.Sort(all.waits)
	return all, context.Cause(ctx)
}

func repeat(ctx context.Context, end time.Time, op func() error) (l load, inTime int, err error) {
	for now := time.Now(); now.Before(end) && ctx.Err() == nil; {
		start := now
		err := op()
		now = time.Now()
		switch {
		case errors.Is(err, errGaveUp):
			l.gaveUp++
		case err != nil:
			return l, inTime, err
		default:
			l.done++
			if !now.After(end) {
				inTime++
			}
		}
		l.waits = append(l.waits, now.Sub(start))
	}
	return l, inTime, nil
}

// percentile returns the wait that p of 1 operations did not exceed.
func (l load) percentile(p float64) time.Duration {
	if len(l.waits) == 0 {
		return 0
	}
	return l.waits[int(p*float64(len(l.waits)-1))]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// cpuTime returns what this process has used so far, its servers not included.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// allocations returns how many allocations one call of f costs, on average over n.
func allocations(n int, f func() error) (float64, error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var before, after runtime.MemStats
	for i := range 2 * n {
		if i == n { // the first half is the warm-up
			runtime.ReadMemStats(&before)
		}
		if err := f(); err != nil {
			return 0, err
		}
	}
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / float64(n), nil
}
