// Package runloop has helpers for blocking Run methods: contexts, an error of Ready, and the memory in use.
package runloop

import (
	"context"
	"runtime/metrics"
	"time"
)

// NotRunning is the error of a Ready method while no Run works in this process: it has not started, or it ends. An
// operator does not count it as a problem, because Run may work in another process.
type NotRunning string

func (e NotRunning) Error() string { return string(e) }

// Detach returns a context that keeps ctx's values and is cancelled grace after ctx is. Running
// work may finish in that time. The caller must call the cancel function.
func Detach(ctx context.Context, grace time.Duration) (context.Context, context.CancelFunc) {
	detached, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		if Sleep(detached, grace) == nil {
			cancel()
		}
	})
	return detached, func() {
		stop()
		cancel()
	}
}

// Sleep waits for d and returns nil. If ctx ends first, it returns the context's error at once.
func Sleep(ctx context.Context, d time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// MemoryInUse returns the bytes that the Go runtime holds and has not returned to the system.
func MemoryInUse() uint64 {
	samples := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"},
		{Name: "/memory/classes/heap/released:bytes"},
	}
	metrics.Read(samples)
	return samples[0].Value.Uint64() - samples[1].Value.Uint64()
}
