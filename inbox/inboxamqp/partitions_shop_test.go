package inboxamqp_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// shop is a handler with deduplication that notes who has done what.
type shop struct {
	mu      sync.Mutex
	done    map[uuid.UUID]bool
	running map[string]bool
	effects map[string][]string // bodies by key
	by      map[int]map[string]int
	wrong   []string
	fails   float64

	overlaps bool // a process that has lost its connection ends what it has begun, while another one begins
}

func newShop(fails float64) *shop {
	return &shop{done: map[uuid.UUID]bool{}, running: map[string]bool{}, effects: map[string][]string{}, by: map[int]map[string]int{}, fails: fails}
}

// process returns the handler of a process.
func (s *shop) process(number int) processorFunc {
	return func(_ context.Context, m *inbox.Message) error {
		s.begin(m)
		time.Sleep(rand.N(4 * time.Millisecond))
		return s.end(number, m)
	}
}

func (s *shop) begin(m *inbox.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running[m.Key] && !s.overlaps {
		s.wrong = append(s.wrong, "two messages at once of "+m.Key)
	}
	s.running[m.Key] = true
}

func (s *shop) end(number int, m *inbox.Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running[m.Key] = false
	if s.done[m.ID] {
		return nil
	}
	if rand.Float64() < s.fails {
		return errBroken
	}
	s.done[m.ID] = true
	s.effects[m.Key] = append(s.effects[m.Key], string(m.Body))
	if s.by[number] == nil {
		s.by[number] = map[string]int{}
	}
	s.by[number][m.Queue]++
	return nil
}

func (s *shop) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.done)
}

// queues are those of which a process has had messages since the last call.
func (s *shop) queues(number int) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n = len(s.by[number])
	delete(s.by, number)
	return n
}

// await waits for so many effects, or for that of all messages.
func (s *shop) await(t *testing.T, n int) {
	t.Helper()
	testenv.Eventually(t, func() error {
		if got := s.count(); got < n {
			return fmt.Errorf("%d of %d messages", got, n)
		}
		return nil
	})
}

// check looks at the order of each key.
func (s *shop) check(t *testing.T, keys, each int) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, wrong := range s.wrong {
		t.Error(wrong)
	}
	if len(s.effects) != keys {
		t.Errorf("%d keys", len(s.effects))
	}
	for key, bodies := range s.effects {
		if len(bodies) != each {
			t.Errorf("%s: %d of %d messages", key, len(bodies), each)
		}
		for i, body := range bodies {
			if body != fmt.Sprint(i) {
				t.Errorf("%s is out of order: %v", key, bodies)
				break
			}
		}
	}
}

// publish puts messages of keys into the exchange, numbered from first on.
func publish(t *testing.T, b *amqptest.Broker, keys, first, each int) {
	t.Helper()
	ch := b.Channel(t)
	must(t, ch.Confirm(false))
	var last *amqp.DeferredConfirmation
	for n := first; n < first+each; n++ {
		for k := range keys {
			p := keyed(fmt.Sprint("k", k))
			p.Body = fmt.Append(nil, n)
			var err error
			last, err = ch.PublishWithDeferredConfirm("shop", "order.placed", true, false, p)
			must(t, err)
		}
	}
	if ok, err := last.WaitContext(t.Context()); err != nil || !ok {
		t.Fatalf("not confirmed: %v", err)
	}
}
