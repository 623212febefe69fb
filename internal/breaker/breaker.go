// Package breaker spares a server that does not answer, and its callers the wait. A Breaker counts calls. A Server also
// asks again, on another connection, where one has fallen silent.
package breaker

import (
	"context"
	"errors"
	"fmt"
	"net"
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

const (
	// Longest is how long one try of a Server may take. It is half of what the caller has left
	// if that is less, so that there is time for another try.
	Longest = 2 * time.Second

	most          = 3 // tries of one call
	failuresInRow = 5 // after these the server is left alone
	pause         = time.Second
	tooShort      = 50 * time.Millisecond  // a try that ended sooner says nothing about the server
	silence       = 500 * time.Millisecond // a caller who leaves after this has met a silent connection
)

var (
	// ErrSilent says that a call was not answered in time. It may have taken effect, and may take
	// effect later. It is a context.DeadlineExceeded.
	ErrSilent error = silent{}
	// ErrDown says that the server was not asked, for it has not answered lately.
	ErrDown = errors.New("the server has not answered lately and was not asked")
)

type silent struct{}

func (silent) Error() string        { return "the server does not answer" }
func (silent) Is(target error) bool { return target == context.DeadlineExceeded }

// Server is one that may fall silent. Make it with NewServer. It is safe for concurrent
// use.
type Server struct {
	answered func(err error) bool
	silent   func(ctx context.Context)
	breaker  *Breaker
}

// NewServer returns a Server. answered reports whether an error is the server's own
// answer. silent is called after a try without an answer, also if the caller gave up, unless
// it did so within half a second. It must not block; it may start tests of the idle connections.
func NewServer(answered func(err error) bool, silent func(ctx context.Context)) *Server {
	return &Server{answered: answered, silent: silent, breaker: New(failuresInRow, pause)}
}

// Ask calls try until the server answers, three times at most. try must be safe to
// repeat, also while an earlier try is still under way, and must end with its
// context. Errors that come soon are returned at once.
//
// With guarded, a server that has not answered lately is not asked but for one try
// a second: that is ErrDown. A caller who came before that was known has a second try all the
// same: connections that fall silent at once make their callers fail together, while others work.
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

// once makes one try and reports whether it took all of its time, or all that the client gave it.
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
	timeout, ok := errors.AsType[net.Error](err)                                  // of the client's own
	silent = ctx.Err() != nil || took >= limit-limit/8 || ok && timeout.Timeout() // its timers may be a little early
	if !silent || took >= tooShort {
		s.breaker.Done(false)
	}
	return err, silent
}
