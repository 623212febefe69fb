package telemetry

import (
	"sync"
	"time"
)

// quietFor is how long nothing more is logged about a fault.
const quietFor = 10 * time.Second

// Seldom keeps a fault that repeats from filling a log: a line now and then, with how
// often it came meanwhile. The zero value is ready. It is safe for concurrent use.
type Seldom struct {
	mu      sync.Mutex
	last    time.Time
	skipped int
}

// Due reports whether to log now, and how many times it said no since the last time.
func (s *Seldom) Due() (skipped int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.last.IsZero() && time.Since(s.last) < quietFor {
		s.skipped++
		return 0, false
	}
	skipped, s.last, s.skipped = s.skipped, time.Now(), 0
	return skipped, true
}

// maxKinds bounds how many kinds of faults are told apart.
const maxKinds = 1000

// SeldomEach is a Seldom for each kind of fault. The zero value is ready. It is safe for
// concurrent use.
type SeldomEach struct {
	mu    sync.Mutex
	kinds map[string]*Seldom
}

// Due is that of the kind's Seldom. After 1000 kinds the others share one.
func (s *SeldomEach) Due(kind string) (skipped int, ok bool) { return s.of(kind).Due() }

func (s *SeldomEach) of(kind string) *Seldom {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.kinds) >= maxKinds && s.kinds[kind] == nil {
		kind = ""
	}
	if s.kinds == nil {
		s.kinds = map[string]*Seldom{}
	}
	if s.kinds[kind] == nil {
		s.kinds[kind] = &Seldom{}
	}
	return s.kinds[kind]
}
