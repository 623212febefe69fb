package txretry

import (
	"sync"
	"time"
)

// seldomPause is how long nothing is logged after a line about the same fault.
const seldomPause = 10 * time.Second

// seldom keeps a fault of the server from filling the log.
type seldom struct {
	mu    sync.Mutex
	last  time.Time
	quiet int
}

// due reports whether to log now, and how often that was not so since the last time.
func (s *seldom) due() (skipped int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.last.IsZero() && time.Since(s.last) < seldomPause {
		s.quiet++
		return 0, false
	}
	skipped, s.last, s.quiet = s.quiet, time.Now(), 0
	return skipped, true
}
