// Package load repeats an operation from many goroutines, and measures it.
package load

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// ErrGaveUp is the error of an operation that ended normally but without its effect. It is counted, and the load
// continues.
var ErrGaveUp = errors.New("gave up")

// Load is the result of a load.
type Load struct {
	Rate   float64         // operations per second, those that ended in time
	Done   int             // operations that succeeded, late ones included
	GaveUp int             // operations that ended with ErrGaveUp
	Missed int             // operations that DriveAt did not start, because no goroutine was free before the end
	Waits  []time.Duration // of all operations, in ascending order
}

// Drive makes goroutines repeat op for that long. It waits for operations that are still running at the end: their
// durations count, but they do not count in the rate. The first error ends the load.
func Drive(ctx context.Context, goroutines int, length time.Duration, op func(ctx context.Context, worker int) error) (Load, error) {
	asFree := func(free time.Time) time.Time { return free }
	return drive(ctx, goroutines, time.Now().Add(length), length, asFree, op)
}

// DriveAt is Drive at a pace: rate operations are due each second, over all goroutines, the first one at once. Late
// operations are made up for. The wait of an operation counts from its due time, not from when a goroutine was
// free. Otherwise a stall would lengthen the waits of a few operations only, although all operations due in that
// time had to wait. A missed operation counts with the time until the end.
func DriveAt(ctx context.Context, goroutines int, rate float64, length time.Duration, op func(ctx context.Context, worker int) error) (Load, error) {
	began, every := time.Now(), time.Duration(float64(time.Second)/rate)
	var turns atomic.Int64
	inTurn := func(time.Time) time.Time { return began.Add(time.Duration(turns.Add(1)-1) * every) }
	return drive(ctx, goroutines, began.Add(length), length, inTurn, op)
}

// drive makes goroutines repeat op. due returns the due time of the next operation, for a goroutine that is free at
// a time.
func drive(ctx context.Context, goroutines int, end time.Time, length time.Duration, due func(free time.Time) time.Time, op func(ctx context.Context, worker int) error) (Load, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		wg     sync.WaitGroup
		mu     sync.Mutex
		all    Load
		inTime int
	)
	for worker := range goroutines {
		wg.Go(func() {
			mine, onTime, err := repeat(ctx, end, due, func() error { return op(ctx, worker) })
			if err != nil {
				cancel(err)
			}
			mu.Lock()
			defer mu.Unlock()
			all.Done += mine.Done
			all.GaveUp += mine.GaveUp
			all.Missed += mine.Missed
			all.Waits = append(all.Waits, mine.Waits...)
			inTime += onTime
		})
	}
	wg.Wait()
	all.Rate = float64(inTime) / length.Seconds()
	slices.Sort(all.Waits)
	return all, context.Cause(ctx)
}

func repeat(ctx context.Context, end time.Time, due func(free time.Time) time.Time, op func() error) (l Load, inTime int, err error) {
	for now := time.Now(); ctx.Err() == nil; {
		start := due(now)
		if !start.Before(end) {
			break
		}
		if !now.Before(end) {
			l.Missed++
			l.Waits = append(l.Waits, end.Sub(start))
			continue
		}
		if early := start.Sub(now); early > 0 && runloop.Sleep(ctx, early) != nil {
			break
		}
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

// CPUTime returns the processor time of this process so far, without its servers.
func CPUTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
