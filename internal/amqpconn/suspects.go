package amqpconn

import (
	"errors"
	"sync"

	amqp "github.com/rabbitmq/amqp091-go"
)

// maxSuspects bounds what is remembered: messages that never come again are never cleared.
const maxSuspects = 10_000

// suspects are the messages over one of which the broker has ended a session, without saying which.
// Each is published alone from then on, until it has an answer of its own. So the one to blame is
// found out, and does not take the others along for ever.
type suspects struct {
	alone sync.Mutex // held by who collects all places

	mu  sync.RWMutex
	ids map[string]bool // of the messages; those without an id are not known again
}

func (s *suspects) has(out Out) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.ids[out.Message.MessageId]
}

func (s *suspects) add(entries []*entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ids == nil || len(s.ids) > maxSuspects {
		s.ids = map[string]bool{}
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

// refusal reports whether a session ended because the broker refused something it was sent, and not
// by a fault of the way there, a shutdown or an operator.
func refusal(err error) bool {
	reply, ok := errors.AsType[*amqp.Error](err)
	return ok && reply.Server && reply.Code != amqp.ConnectionForced
}
