package inboxpgx

import (
	"context"
	"fmt"
	"sync"
	"time"

	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/actor"
	"github.com/holdfast-go/holdfast/internal/pgpause"
)

// pausePoll is how often a consumer looks whether it is paused by another process.
const pausePoll = 2 * time.Second

// pausing is the pause of a Store's consumer.
type pausing struct {
	mu      sync.Mutex
	changed chan struct{}     // closed when this process has changed it; nil: nobody waits
	kept    inboxdriver.Pause // with Config.Entries
}

// Pause implements driver.Pausable of inbox. With Config.Entries it is known to this Store only.
func (s *Store) Pause(ctx context.Context, by, reason string) error {
	defer s.pausing.tell()
	if s.table != nil {
		return pauseError("pause", s.pause().Set(ctx, by, reason))
	}
	if err := actor.Check("by", "reason", by, reason); err != nil {
		return pauseError("pause", err)
	}
	s.pausing.keep(func(p *inboxdriver.Pause) {
		p.By, p.Reason = by, reason
		if p.Since.IsZero() {
			p.Since = time.Now()
		}
	})
	return nil
}

// Resume implements driver.Pausable of inbox.
func (s *Store) Resume(ctx context.Context) error {
	defer s.pausing.tell()
	if s.table != nil {
		return pauseError("resume", s.pause().Clear(ctx))
	}
	s.pausing.keep(func(p *inboxdriver.Pause) { *p = inboxdriver.Pause{} })
	return nil
}

// Paused implements driver.Pausable of inbox.
func (s *Store) Paused(ctx context.Context) (inboxdriver.Pause, error) {
	if s.table != nil {
		state, err := s.pause().Get(ctx)
		return inboxdriver.Pause(state), pauseError("paused", err)
	}
	s.pausing.mu.Lock()
	defer s.pausing.mu.Unlock()
	return s.pausing.kept, nil
}

// WatchPause implements driver.Pausable of inbox. Other processes are noticed within 2 s.
func (s *Store) WatchPause(ctx context.Context, tell func(inboxdriver.Pause)) {
	var told *inboxdriver.Pause
	for ctx.Err() == nil {
		changed := s.pausing.wait()
		now, err := s.Paused(ctx)
		if told == nil || err == nil && now != *told {
			tell(now)
			told = &now
		}
		var poll <-chan time.Time
		if s.table != nil {
			poll = time.After(pausePoll)
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-poll:
		}
	}
}

func (s *Store) pause() pgpause.Switch {
	return pgpause.Switch{Pool: s.pool, Table: s.table.names.pause, Part: s.consumer, Missing: s.table.missing}
}

func pauseError(what string, err error) error {
	if err != nil {
		return fmt.Errorf("inboxpgx: %s: %w", what, err)
	}
	return nil
}

func (p *pausing) keep(change func(*inboxdriver.Pause)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.kept)
}

// wait returns what tell closes.
func (p *pausing) wait() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

func (p *pausing) tell() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}
