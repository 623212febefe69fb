// Package load repeats an operation from many goroutines, and measures what that took.
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

// ErrGaveUp is what an operation returns that ended in order and without its
// effect. It is counted, and the load goes on.
var ErrGaveUp = errors.New("gave up")

// Load is what some goroutines did in a while.
type Load struct {
	Rate   float64         // operations per second, those that ended in time
	Done   int             // operations that succeeded, late ones included
	GaveUp int             // operations that ended with ErrGaveUp
	Missed int             // operations that DriveAt did not begin, since no goroutine was free before the end
	Waits  []time.Duration // of all operations, in ascending order
}

// Drive has goroutines repeat op for that long. Operations under way at the end
// are waited for: their durations count, they do not count in the rate. The
// first error ends the load.
func Drive(ctx context.Context, goroutines int, length time.Duration, op func(ctx context.Context, worker int) error) (Load, error) {
	asFree := func(free time.Time) time.Time { return free }
	return drive(ctx, goroutines, time.Now().Add(length), length, asFree, op)
}

// DriveAt is Drive at a pace: rate operations are due each second, over all goroutines, the first one at once.
// What is late, because operations took long, is made up for. The wait of an operation counts from when it was due,
// not from when a goroutine was free for it: otherwise a stall would lengthen the waits of some operations alone,
// while all that were due meanwhile had to wait as well. Those that are missed count with the time until the end.
func DriveAt(ctx context.Context, goroutines int, rate float64, length time.Duration, op func(ctx context.Context, worker int) error) (Load, error) {
	began, every := time.Now(), time.Duration(float64(time.Second)/rate)
	var turns atomic.Int64
	inTurn := func(time.Time) time.Time { return began.Add(time.Duration(turns.Add(1)-1) * every) }
	return drive(ctx, goroutines, began.Add(length), length, inTurn, op)
}

// drive has goroutines repeat op. due tells when the operation is due that a goroutine would be free to begin.
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

// CPUTime returns what this process has used so far, its servers not included.
func CPUTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
