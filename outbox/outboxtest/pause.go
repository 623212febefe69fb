package outboxtest

import (
	"context"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/internal/actor"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Pause implements driver.Pausable.
func (s *Store) Pause(_ context.Context, by, reason string) error {
	if err := actor.Check("by", "reason", by, reason); err != nil {
		return fmt.Errorf("outboxtest: pause: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pause.By, s.pause.Reason = by, reason
	if s.pause.Since.IsZero() {
		s.pause.Since = time.Now()
	}
	return nil
}

// Resume implements driver.Pausable. It wakes a relay.
func (s *Store) Resume(context.Context) error {
	s.mu.Lock()
	s.pause = driver.Pause{}
	s.mu.Unlock()
	s.Wake()
	return nil
}

// Paused implements driver.Pausable.
func (s *Store) Paused(context.Context) (driver.Pause, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pause, nil
}
