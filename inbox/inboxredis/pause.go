package inboxredis

import (
	"context"
	"errors"
	"fmt"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Pause implements driver.Pausable: it pauses the next processor. The error is errors.ErrUnsupported
// where that cannot be paused.
func (p *Processor) Pause(ctx context.Context, by, reason string) error {
	if next, ok := p.next.(driver.Pausable); ok {
		return next.Pause(ctx, by, reason)
	}
	return p.notPausable("pause")
}

// Resume implements driver.Pausable, as Pause does.
func (p *Processor) Resume(ctx context.Context) error {
	if next, ok := p.next.(driver.Pausable); ok {
		return next.Resume(ctx)
	}
	return p.notPausable("resume")
}

// Paused implements driver.Pausable. What cannot be paused is not.
func (p *Processor) Paused(ctx context.Context) (driver.Pause, error) {
	if next, ok := p.next.(driver.Pausable); ok {
		return next.Paused(ctx)
	}
	return driver.Pause{}, nil
}

// WatchPause implements driver.Pausable. A consumer begins nothing before it was told: that there is no
// pause is told, too.
func (p *Processor) WatchPause(ctx context.Context, tell func(driver.Pause)) {
	if next, ok := p.next.(driver.Pausable); ok {
		next.WatchPause(ctx, tell)
		return
	}
	tell(driver.Pause{})
	<-ctx.Done()
}

func (p *Processor) notPausable(what string) error {
	return fmt.Errorf("inboxredis: %s: the next processor is a %T: %w", what, p.next, errors.ErrUnsupported)
}
