package amqpconn

import (
	"sync"

	"github.com/holdfast-go/holdfast/internal/isolate"
)

// maxSuspects bounds what is remembered: messages that never come again are never cleared.
const maxSuspects = 10_000

// suspects are the messages over one of which the broker has closed a channel or a connection,
// without saying which. Each is published alone from then on, until it has an answer of its own. So
// the one to blame is found, and does not take the others along for ever.
type suspects struct {
	turn chan struct{} // has room for the one who collects all places

	mu     sync.RWMutex
	search *isolate.Search[string] // by id; messages without one are not known again
}

func newSuspects() *suspects {
	search := isolate.New[string](isolate.Singles)
	search.Most = maxSuspects
	return &suspects{turn: make(chan struct{}, 1), search: search}
}

func (s *suspects) has(out Out) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.search.Has(out.Message.MessageId)
}

func (s *suspects) add(entries []*entry) {
	var ids []string
	for _, e := range entries {
		if id := e.out.Message.MessageId; id != "" {
			ids = append(ids, id)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.search.Failed(ids...)
}

func (s *suspects) clear(out Out) {
	if !s.has(out) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.search.Clear(out.Message.MessageId)
}
