// Package blame tells a message that looks like an outage from an outage: its handler may
// itself break off the connection to the database, each time.
package blame

import (
	"sync"
	"sync/atomic"

	"github.com/google/uuid"
)

const (
	// strikes make a failure the message's own: once is what the last message before the
	// end of an outage sees, too.
	strikes = 2

	// most bounds what is remembered of messages that other consumers have finished.
	most = 4096
)

// Suspects are the messages that could not be processed for want of a server. The zero value
// is ready. It is safe for concurrent use.
type Suspects struct {
	mu    sync.Mutex
	count map[uuid.UUID]int
	some  atomic.Bool // whether count holds anything: what goes well pays nothing
}

// Suspect notes a message that failed together with others.
func (s *Suspects) Suspect(id uuid.UUID) { s.add(id, 0) }

// Strike notes that a message failed alone and another one, begun later, went through. It
// reports whether that was so twice in a row: then the failure is the message's own.
func (s *Suspects) Strike(id uuid.UUID) (own bool) { return s.add(id, 1) >= strikes }

func (s *Suspects) add(id uuid.UUID, n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.count == nil || len(s.count) >= most {
		s.count = map[uuid.UUID]int{}
	}
	s.count[id] += n
	s.some.Store(true)
	return s.count[id]
}

// Has reports whether a message is suspected. Then it must be processed alone.
func (s *Suspects) Has(id uuid.UUID) bool {
	if !s.some.Load() {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, suspected := s.count[id]
	return suspected
}

// Struck reports whether a message has failed alone before, while another one went through.
func (s *Suspects) Struck(id uuid.UUID) bool {
	if !s.some.Load() {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count[id] > 0
}

// Clear forgets a message that was processed, or whose failure was found to be its own.
func (s *Suspects) Clear(id uuid.UUID) {
	if !s.some.Load() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.count, id)
	s.some.Store(len(s.count) > 0)
}
