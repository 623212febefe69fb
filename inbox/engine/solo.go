package engine

import (
	"context"
	"sync"
)

// Solo is shared by consumers that run in one process. A message that may have ended the process then runs
// with nothing beside it in any of them. The zero value is ready for use.
type Solo struct {
	mu      sync.Mutex
	running int           // jobs
	suspect bool          // one of them may have ended the process
	waiting int           // suspects that wait for the others to end
	changed chan struct{} // closed when one of these changes; nil: nobody waits
}

// enter waits until a job may run beside those that do, for soloPatience at most, and until ctx ends.
// The job has ended when leave is called. A nil Solo never waits.
func (s *Solo) enter(ctx context.Context, suspect bool) (leave func()) {
	if s == nil {
		return func() {}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if suspect {
		s.waiting++
	}
	s.await(ctx, func() bool {
		if suspect {
			return s.running == 0
		}
		return !s.suspect && s.waiting == 0
	})
	if suspect {
		s.waiting--
		s.suspect = true
	}
	s.running++
	return func() { s.leave(suspect) }
}

// await waits with the lock held until free returns true, or the wait is over.
func (s *Solo) await(ctx context.Context, free func() bool) {
	if free() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, soloPatience)
	defer cancel()
	for !free() && ctx.Err() == nil {
		if s.changed == nil {
			s.changed = make(chan struct{})
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
		}
		s.mu.Lock()
	}
}

func (s *Solo) leave(suspect bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running--
	if suspect {
		s.suspect = false
	}
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}
