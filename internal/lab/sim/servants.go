package sim

import "sync"

// servants are goroutines that are used again: the handlers' stacks are deep, and letting them grow for
// every request takes a tenth of the time.
type servants struct {
	mu    sync.Mutex
	idle  []chan func()
	ended bool
}

func (s *servants) run(job func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if last := len(s.idle) - 1; last >= 0 {
		s.idle[last] <- job
		s.idle = s.idle[:last]
		return
	}
	jobs := make(chan func(), 1)
	jobs <- job
	go s.serve(jobs)
}

func (s *servants) serve(jobs chan func()) {
	for job := range jobs {
		job()
		if !s.rest(jobs) {
			return
		}
	}
}

// rest notes that a servant has nothing to do. False: there will be nothing more.
func (s *servants) rest(jobs chan func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = append(s.idle, jobs)
	return !s.ended
}

// end has them end when they have nothing to do.
func (s *servants) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for _, jobs := range s.idle {
		close(jobs)
	}
}
