package inboxamqp

import (
	"fmt"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
)

const (
	// refusalAge is how long a refusal is remembered. The messages concerned come again before
	// that, if they are this consumer's.
	refusalAge = maxSlot + 15*time.Second

	// refusalLog is how often the log names one queue.
	refusalLog = 30 * time.Second

	// slot is the distance in time of messages that come again. Their handlers run for nothing,
	// as long as the queue is not mended, and share the workers with the others.
	slot = 50 * time.Millisecond

	// maxSlot bounds how far apart many messages come again.
	maxSlot = time.Minute
)

// displacements are the pauses of one message while nothing takes copies: 1 s growing to 5 s.
var displacements = backoff.Policy{Base: time.Second, Max: 5 * time.Second}

// refusals knows the queues that take no copies: they are missing, full or closed to us.
type refusals struct {
	mu     sync.Mutex
	queues map[string]refusal
	inARow int
	next   time.Time // the first free slot
}

type refusal struct {
	err          error
	last, logged time.Time
}

// note remembers that a queue refused a copy, and reports whether to log it.
func (f *refusals) note(queue string, err error, now time.Time) (log bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.queues == nil {
		f.queues = map[string]refusal{}
	}
	logged := f.queues[queue].logged
	if log = now.Sub(logged) > refusalLog; log {
		logged = now
	}
	f.queues[queue] = refusal{err, now, logged}
	f.inARow++
	return log
}

// clear notes that a queue takes copies.
func (f *refusals) clear(queue string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, known := f.queues[queue]; known {
		delete(f.queues, queue)
		f.inARow, f.next = 0, time.Time{}
	}
}

// pause is how long the next message stays away.
func (f *refusals) pause(now time.Time) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.next.Before(now) {
		f.next = now
	}
	f.next = f.next.Add(slot)
	return min(max(f.next.Sub(now), displacements.Delay(f.inARow-1, 0)), maxSlot)
}

// err names a queue that has refused a copy lately.
func (f *refusals) err(now time.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for queue, refused := range f.queues {
		if now.Sub(refused.last) < refusalAge {
			return fmt.Errorf("inboxamqp: queue %q takes no failed messages: %w", queue, refused.err)
		}
	}
	return nil
}
