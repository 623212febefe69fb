// Package load repeats an operation from many goroutines, and measures what that took.
package load

import (
	"context"
	"errors"
	"slices"
	"sync"
	"syscall"
	"time"
)

// ErrGaveUp is what an operation returns that ended in order and without its
// effect. It is counted, and the load goes on.
var ErrGaveUp = errors.New("gave up")

// Load is what some goroutines did in a while.
type Load struct {
	Rate   float64         // operations per second, those that ended in time
	Done   int             // operations that succeeded, late ones included
	GaveUp int             // operations that ended with ErrGaveUp
	Waits  []time.Duration // of all operations, in ascending order
}

// Drive has goroutines repeat op for that long. Operations under way at the end
// are waited for: their durations count, they do not count in the rate. The
// first error ends the load.
func Drive(ctx context.Context, goroutines int, length time.Duration, op func(ctx context.Context, worker int) error) (Load, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		wg     sync.WaitGroup
		mu     sync.Mutex
		all    Load
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
			all.Done += mine.Done
			all.GaveUp += mine.GaveUp
			all.Waits = append(all.Waits, mine.Waits...)
			inTime += onTime
		})
	}
	wg.Wait()
	all.Rate = float64(inTime) / length.Seconds()
	slices.Sort(all.Waits)
	return all, context.Cause(ctx)
}

func repeat(ctx context.Context, end time.Time, op func() error) (l Load, inTime int, err error) {
	for now := time.Now(); now.Before(end) && ctx.Err() == nil; {
		start := now
		err := op()
		now = time.Now()
		switch {
		case errors.Is(err, ErrGaveUp):
			l.GaveUp++
		case err != nil:
			return l, inTime, err
		default:
			l.Done++
			if !now.After(end) {
				inTime++
			}
		}
		l.Waits = append(l.Waits, now.Sub(start))
	}
	return l, inTime, nil
}

// Percentile returns the wait that p of 1 operations did not exceed.
func (l Load) Percentile(p float64) time.Duration {
	if len(l.Waits) == 0 {
		return 0
	}
	return l.Waits[int(p*float64(len(l.Waits)-1))]
}

// CPUTime returns what this process has used so far, its servers not included.
func CPUTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
