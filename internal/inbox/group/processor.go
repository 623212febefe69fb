package group

import (
	"context"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/check"
)

// shared wraps the processor for the consumer of each partition. It counts messages for MessageLimit and
// passes a pause to all consumers. It has no Background, because the group runs that.
type shared struct {
	inbox.Processor
	driver.Pausable // of the processor; nil: it cannot be paused

	mu      sync.Mutex
	limited bool
	left    int           // messages left, if limited
	reached func()        // called when none is left
	pause   *driver.Pause // nil: not known yet
	changed chan struct{} // closed when the pause changes
}

func newShared(p inbox.Processor) *shared {
	s := &shared{Processor: p, changed: make(chan struct{})}
	s.Pausable, _ = p.(driver.Pausable)
	return s
}

// begin starts a run of at most most messages; 0 means any number.
func (s *shared) begin(most int, reached func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.limited, s.left, s.reached, s.pause = most > 0, most, reached, nil
}

// Process implements inbox.Processor. Messages above the limit are not processed: the run drains, and they stay
// with the broker.
func (s *shared) Process(ctx context.Context, msgs []*inbox.Message) []error {
	n := s.take(len(msgs))
	if n == len(msgs) {
		return s.Processor.Process(ctx, msgs)
	}
	var results []error
	if n > 0 {
		results = s.Processor.Process(ctx, msgs[:n])
	}
	for range len(msgs) - n {
		results = append(results, inbox.ErrDraining)
	}
	return results
}

// take returns how many of n messages may be processed.
func (s *shared) take(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.limited {
		return n
	}
	n = min(n, s.left)
	if s.left -= n; s.left == 0 && n > 0 {
		s.reached()
	}
	return n
}

// watch passes a pause to all consumers until ctx ends.
func (s *shared) watch(ctx context.Context) {
	if s.Pausable == nil {
		s.tell(driver.Pause{})
		return
	}
	s.Pausable.WatchPause(ctx, s.tell)
}

func (s *shared) tell(p driver.Pause) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pause = &p
	close(s.changed)
	s.changed = make(chan struct{})
}

// WatchPause implements driver.Pausable.
func (s *shared) WatchPause(ctx context.Context, tell func(driver.Pause)) {
	for ctx.Err() == nil {
		s.mu.Lock()
		pause, changed := s.pause, s.changed
		s.mu.Unlock()
		if pause != nil {
			tell(*pause)
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// Ledger implements driver.Deduplicator.
func (s *shared) Ledger() driver.Ledger {
	if d, ok := s.Processor.(driver.Deduplicator); ok {
		return d.Ledger()
	}
	return nil
}

// Retention implements driver.Deduplicator.
func (s *shared) Retention() time.Duration {
	if d, ok := s.Processor.(driver.Deduplicator); ok {
		return d.Retention()
	}
	return 0
}

// Limit implements driver.Limiter.
func (s *shared) Limit(name string) int {
	if l, ok := s.Processor.(driver.Limiter); ok {
		return l.Limit(name)
	}
	return 0
}

// Memory has the properties of a processor that remembers messages.
type Memory struct {
	Remembers bool          // processed messages
	Retention time.Duration // of processed messages
	Ledger    bool          // it counts attempts
}

// MemoryOf returns the memory of a processor.
func MemoryOf(p inbox.Processor) Memory {
	if d, ok := p.(driver.Deduplicator); ok {
		return Memory{Remembers: true, Retention: d.Retention(), Ledger: d.Ledger() != nil}
	}
	return Memory{Retention: driver.DefaultRetention}
}

// Check adds the findings of a consumer whose processor remembers too little.
func (m Memory) Check(cfg inbox.ConsumerConfig, found *check.Findings) {
	if window := driver.Horizon(cfg.Retry); m.Remembers && m.Retention > 0 && m.Retention < window {
		found.Add("lengthen the Retention of the processor, or shorten ConsumerConfig.Retry.MaxAge",
			"a message may be retried for %v, and is remembered for %v: after that it takes effect again", window, m.Retention)
	}
	if cfg.Ordered && !m.Ledger {
		found.Add("use a processor with a ledger, such as inboxpgx", "the attempts of an ordered message are lost when the process ends: the processor keeps no ledger")
	}
}
