package amqpconn

import "sync"

// maxSuspects bounds what is remembered: messages that never come again are never cleared.
const maxSuspects = 10_000

// suspects are the messages over one of which the broker has closed a channel or a connection,
// without saying which. Each is published alone from then on, until it has an answer of its own. So
// the one to blame is found, and does not take the others along for ever.
type suspects struct {
	turn chan struct{} // has room for the one who collects all places

	mu  sync.RWMutex
	ids map[string]bool // of the messages; those without an id are not known again
}

func newSuspects() *suspects { return &suspects{turn: make(chan struct{}, 1), ids: map[string]bool{}} }

func (s *suspects) has(out Out) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.ids[out.Message.MessageId]
}

func (s *suspects) add(entries []*entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.ids) > maxSuspects {
		clear(s.ids)
	}
	for _, e := range entries {
		if id := e.out.Message.MessageId; id != "" {
			s.ids[id] = true
		}
	}
}

func (s *suspects) clear(out Out) {
	if !s.has(out) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ids, out.Message.MessageId)
}
