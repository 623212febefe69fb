// Package breaker limits calls to a server that does not answer, so that callers fail fast. A Breaker counts failed
// calls. A Server also retries on another connection if the first one has fallen silent.
package breaker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"
)

// Breaker lets calls pass until several in a row have failed. Then it lets one call pass per pause, until one succeeds.
// Make it with New. It is safe for concurrent use.
type Breaker struct {
	most     int32
	pause    time.Duration
	start    time.Time
	failures atomic.Int32
	until    atomic.Int64 // since start, when the next call may pass; 0: all may
}

// New returns a Breaker that opens after the given number of failures in a row.
func New(failures int, pause time.Duration) *Breaker {
	return &Breaker{most: int32(failures), pause: pause, start: time.Now()}
}

// Enter reports whether a call may be made now. The caller reports the call's outcome to Done, unless the caller itself
// gave up.
func (b *Breaker) Enter() bool {
	until := b.until.Load()
	if until == 0 {
		return true
	}
	now := int64(time.Since(b.start))
	return now >= until && b.until.CompareAndSwap(until, now+int64(b.pause))
}

// Done records the outcome of a call. It reports whether that opened or closed the breaker.
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

const (
	// Longest bounds one try of a Server. A try takes at most half of the caller's remaining time, if that is less, so
	// that another try fits in.
	Longest = 2 * time.Second

	most          = 3 // tries of one call
	failuresInRow = 5 // after these the breaker opens
	pause         = time.Second
	tooShort      = 50 * time.Millisecond  // a shorter try does not count against the server
	silence       = 500 * time.Millisecond // a caller that gives up after this long had a silent connection
)

var (
	// ErrSilent means that a call was not answered in time. It may have taken effect, or may take effect later.
	// errors.Is reports it as a context.DeadlineExceeded.
	ErrSilent error = silent{}
	// ErrDown means that the server has not answered recently, so the call was not sent.
	ErrDown = errors.New("the server has not answered recently; the call was not sent")
)

type silent struct{}

func (silent) Error() string        { return "the server does not answer" }
func (silent) Is(target error) bool { return target == context.DeadlineExceeded }

// Server guards a server that may fall silent. Make it with NewServer. It is safe for concurrent use.
type Server struct {
	answered func(err error) bool
	silent   func(ctx context.Context)
	breaker  *Breaker
}

// NewServer returns a Server. answered reports whether an error is an answer of the server. silent is called after a
// try without an answer, also if the caller gave up, but not if it gave up within half a second. silent must not block;
// it may start tests of the idle connections.
func NewServer(answered func(err error) bool, silent func(ctx context.Context)) *Server {
	return &Server{answered: answered, silent: silent, breaker: New(failuresInRow, pause)}
}

// Ask calls try until the server answers, at most three times. try must be safe to repeat, even while an earlier try
// still runs, and must end with its context. Errors that come soon are returned at once.
//
// With guarded, a server that has not answered recently gets one try a second, and other calls return ErrDown. A caller
// that came before the breaker opened still gets a second try: connections that fall silent together make their callers
// fail together, while other connections work.
func (s *Server) Ask(ctx context.Context, guarded bool, try func(ctx context.Context) error) error {
	var last error
	healthy := s.breaker.until.Load() == 0
	for n := range most {
		second := healthy && n == 1
		if guarded && !second && !s.breaker.Enter() {
			if last == nil {
				last = ErrDown
			}
			return last
		}
		err, silent := s.once(ctx, try)
		if !silent {
			return err
		}
		last = fmt.Errorf("%w: %w", ErrSilent, err)
		s.silent(ctx)
		if ctx.Err() != nil {
			return last
		}
	}
	return last
}

// once makes one try. It reports whether the try used up its time, or the time limit of the client.
func (s *Server) once(ctx context.Context, try func(ctx context.Context) error) (err error, silent bool) {
	limit, start := Longest, time.Now()
	if end, ok := ctx.Deadline(); ok {
		limit = min(limit, max(time.Until(end)/2, tooShort))
	}
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	err = try(bounded)
	if err == nil || s.answered(err) {
		s.breaker.Done(true)
		return err, false
	}
	took := time.Since(start)
	if errors.Is(ctx.Err(), context.Canceled) { // the caller gave up
		if took >= silence {
			s.silent(ctx)
		}
		return err, false
	}
	timeout, ok := errors.AsType[net.Error](err)                                  // the client's own timeout
	silent = ctx.Err() != nil || took >= limit-limit/8 || ok && timeout.Timeout() // the client's timers may be a little early
	if !silent || took >= tooShort {
		s.breaker.Done(false)
	}
	return err, silent
}
