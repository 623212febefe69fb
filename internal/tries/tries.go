// Package tries asks a server again, on another connection, when one has fallen
// silent. A server that answers no call is left alone for a second at a time.
package tries

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/holdfast-go/holdfast/internal/breaker"
)

const (
	// Longest is how long one try may take. It is half of what the caller has left
	// if that is less, so that there is time for another try.
	Longest = 2 * time.Second

	most          = 3 // tries of one call
	failuresInRow = 5 // after these the server is left alone
	pause         = time.Second
	tooShort      = 50 * time.Millisecond  // a try that ended sooner says nothing about the server
	silence       = 500 * time.Millisecond // a caller who leaves after this has met a silent connection
)

var (
	// ErrSilent says that no try was answered in time. The call may have taken effect,
	// and may take effect later. It is a context.DeadlineExceeded.
	ErrSilent = fmt.Errorf("the server has not answered in time: %w", context.DeadlineExceeded)
	// ErrDown says that the server was not asked, for it has not answered lately.
	ErrDown = errors.New("the server has not answered lately and was not asked")
)

// Server is one that may fall silent. Make it with New. It is safe for concurrent
// use.
type Server struct {
	answered func(err error) bool
	silent   func(ctx context.Context)
	breaker  *breaker.Breaker
}

// New returns a Server. answered reports whether an error is the server's own
// answer. silent is called after a try without an answer, also if the caller gave up, unless
// it did so within half a second. It must not block; it may start tests of the idle connections.
func New(answered func(err error) bool, silent func(ctx context.Context)) *Server {
	return &Server{answered: answered, silent: silent, breaker: breaker.New(failuresInRow, pause)}
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
	healthy := s.breaker.Closed()
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

// timedOut reports whether the client has given up by a timeout of its own.
func timedOut(err error) bool {
	timeout, ok := errors.AsType[net.Error](err)
	return ok && timeout.Timeout()
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
	silent = ctx.Err() != nil || took >= limit-limit/8 || timedOut(err) // the client's own timers may be a little early
	if !silent || took >= tooShort {
		s.breaker.Done(false)
	}
	return err, silent
}
