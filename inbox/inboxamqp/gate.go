package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// healthInterval is how often Config.Health is asked while messages are consumed.
const healthInterval = 5 * time.Second

// healthPatience is how long it may take to answer.
const healthPatience = 3 * time.Second

var errHealthHangs = errors.New("inboxamqp: Config.Health does not answer")

// defaultWindow is how many messages a KillSwitch looks at.
const defaultWindow = 50

// KillSwitch pauses the consumer when too many messages fail that would be tried again: then
// it is likely not the messages, and going on would only use up their attempts. While paused
// a few messages at a time are tried, until one succeeds.
type KillSwitch struct {
	// Ratio of failures among the last messages that pauses, up to 1. 0 means never.
	Ratio float64
	// Window is how many messages are looked at; none pauses before so many. 0 means 50.
	Window int
}

func (k KillSwitch) validate() error {
	var problems []error
	if !(k.Ratio >= 0 && k.Ratio <= 1) {
		problems = append(problems, fmt.Errorf("inboxamqp: Config.KillSwitch.Ratio %v is not from 0 to 1", k.Ratio))
	}
	if k.Window < 0 {
		problems = append(problems, fmt.Errorf("inboxamqp: Config.KillSwitch.Window %d is negative", k.Window))
	}
	return errors.Join(problems...)
}

// gate counts outcomes for a KillSwitch.
type gate struct {
	ratio float64

	mu       sync.Mutex
	last     []bool // a ring of whether each failed
	next, n  int
	failures int
}

func newGate(k KillSwitch) *gate {
	if k.Ratio == 0 {
		return &gate{}
	}
	if k.Window == 0 {
		k.Window = defaultWindow
	}
	return &gate{ratio: k.Ratio, last: make([]bool, k.Window)}
}

// suspicious are the failures that may not be the message's own.
func suspicious(f driver.Failure) bool { return f.Action == driver.ActionRetry && f.Counted }

// note takes an outcome in and reports whether it is time to pause. Then it begins anew.
func (g *gate) note(f driver.Failure) (trip bool) {
	if g.ratio == 0 {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n == len(g.last) && g.last[g.next] {
		g.failures--
	}
	failed := suspicious(f)
	if failed {
		g.failures++
	}
	g.last[g.next] = failed
	g.next = (g.next + 1) % len(g.last)
	g.n = min(g.n+1, len(g.last))
	if g.n < len(g.last) || float64(g.failures) < g.ratio*float64(len(g.last)) || !failed {
		return false
	}
	g.n, g.next, g.failures = 0, 0, 0
	clear(g.last)
	return true
}

// healthy asks Config.Health.
func (r *run) healthy() error {
	if r.c.cfg.Health == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(r.stop, min(healthPatience, r.c.cfg.CallTimeout))
	defer cancel() // not before the answer is taken
	select {
	case r.asking <- struct{}{}:
	case <-ctx.Done(): // it does not mind its context, and has not answered the question before
		return errHealthHangs
	}
	answer := make(chan error, 1)
	go func() {
		defer func() { <-r.asking }()
		answer <- r.c.cfg.Health(ctx)
	}()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return errHealthHangs
	}
}

// watchHealth pauses an epoch of consuming when Config.Health fails.
func (s *session) watchHealth(ctx context.Context, epoch int64) {
	ticker := time.NewTicker(healthInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if err := s.r.healthy(); err != nil && ctx.Err() == nil {
				s.r.c.cfg.Logger.WarnContext(ctx, "not healthy", slog.Any("error", err))
				s.requestPause(epoch, errPause)
				return
			}
		}
	}
}
