// Package breaker spares a server that does not answer, and its callers the wait.
package breaker

import (
	"sync/atomic"
	"time"
)

// Breaker lets calls pass until some in a row have failed, and then one per
// pause, until one succeeds. Make it with New. It is safe for concurrent use.
type Breaker struct {
	most     int32
	pause    time.Duration
	start    time.Time
	failures atomic.Int32
	until    atomic.Int64 // since start, when the next call may pass; 0: all may
}

// New returns a Breaker that opens after so many failures in a row.
func New(failures int, pause time.Duration) *Breaker {
	return &Breaker{most: int32(failures), pause: pause, start: time.Now()}
}

// Enter reports whether a call may be made now. Its outcome is told to Done,
// unless the caller gave up by itself.
func (b *Breaker) Enter() bool {
	until := b.until.Load()
	if until == 0 {
		return true
	}
	now := int64(time.Since(b.start))
	return now >= until && b.until.CompareAndSwap(until, now+int64(b.pause))
}

// Closed reports whether all calls may pass.
func (b *Breaker) Closed() bool { return b.until.Load() == 0 }

// Done notes the outcome of a call. It reports whether that opened or closed the
// breaker.
func (b *Breaker) Done(ok bool) (turned bool) {
	if ok {
		if b.failures.Load() != 0 {
			b.failures.Store(0)
		}
		return b.until.Load() != 0 && b.until.Swap(0) != 0
	}
	if b.failures.Add(1) < b.most {
		return false
	}
	return b.until.Swap(int64(time.Since(b.start)+b.pause)) == 0
}
