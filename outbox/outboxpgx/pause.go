package outboxpgx

import (
	"context"
	"fmt"

	"github.com/holdfast-go/holdfast/internal/pgpause"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Pause implements driver.Pausable.
func (s *Store) Pause(ctx context.Context, by, reason string) error {
	return s.pauseError("pause", s.pause().Set(ctx, by, reason))
}

// Resume implements driver.Pausable. It wakes a relay.
func (s *Store) Resume(ctx context.Context) error {
	if err := s.pause().Clear(ctx); err != nil {
		return s.pauseError("resume", err)
	}
	s.Wake()
	return nil
}

// Paused implements driver.Pausable.
func (s *Store) Paused(ctx context.Context) (driver.Pause, error) {
	state, err := s.pause().Get(ctx)
	return driver.Pause(state), s.pauseError("paused", err)
}

func (s *Store) pause() pgpause.Switch {
	return pgpause.Switch{Pool: s.pool, Table: s.t.pause, Missing: s.t.missing()}
}

func (s *Store) pauseError(what string, err error) error {
	if err != nil {
		return fmt.Errorf("outboxpgx: %s: %w", what, err)
	}
	return nil
}
