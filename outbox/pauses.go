package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// pause is how long a transport is left alone. After its end one batch tries the transport, and the
// others leave it alone until that batch has ended. A reconnect ends it early.
type pause struct {
	failures int // in a row
	since    time.Time
	until    time.Time
	trying   bool
	err      error
}

func pausedError(name string, p pause) error {
	return fmt.Errorf("outbox: transport %q is paused after %d failures: %w", name, p.failures, p.err)
}

// paused returns the names of the transports to leave alone now.
func (r *Relay) paused() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	var names []string
	for name, p := range r.pauses {
		if now.Before(p.until) || p.trying {
			names = append(names, name)
		}
	}
	return names
}

// nextResume returns the time until the next pause ends; 0: no transport is paused.
func (r *Relay) nextResume() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	var next time.Duration
	for _, p := range r.pauses {
		if d := time.Until(p.until); d > 0 && (next == 0 || d < next) {
			next = d
		}
	}
	return next
}

// allPaused returns how long there is nothing to do because every transport is paused.
func (r *Relay) allPaused() time.Duration {
	if len(r.paused()) < len(r.transports) {
		return 0
	}
	return r.nextResume()
}

// tryPaused notes which transports whose pause is over are in a batch that began at begin.
func (r *Relay) tryPaused(messages []driver.Message, begin time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pauses) == 0 {
		return
	}
	for _, m := range messages {
		if p, ok := r.pauses[m.Transport]; ok && !p.since.After(begin) {
			p.trying = true
			r.pauses[m.Transport] = p
		}
	}
}

// outage is why a transport has failed a batch, and when.
type outage struct {
	err error
	at  time.Time
}

// watchPublishers ends the pause of a transport when its publisher is ready again, until stop is called.
func (r *Relay) watchPublishers() (stop func()) {
	var stops []func()
	for name, p := range r.transports {
		if p, ok := p.(driver.Reconnecting); ok {
			stops = append(stops, p.OnReady(func() { r.reconnected(name) }))
		}
	}
	return func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// reconnected ends the pause that a transport has, and explains the failures until now.
func (r *Relay) reconnected(name string) {
	r.mu.Lock()
	now := time.Now()
	r.ready[name] = now
	if p, ok := r.pauses[name]; ok && now.Before(p.until) {
		p.until = now
		r.pauses[name] = p
	}
	r.mu.Unlock()
	r.Wake()
}

// setPause is called when a transport has failed a batch that began at begin. What began before the
// pause it has says nothing new, and a failure from before its publisher's reconnect asks for none.
func (r *Relay) setPause(ctx context.Context, name string, down outage, begin time.Time) {
	r.mu.Lock()
	p := r.pauses[name]
	if p.since.After(begin) {
		r.mu.Unlock()
		return
	}
	d := r.cfg.pauseDelay(p.failures + 1)
	if r.ready[name].After(down.at) {
		d = 0
	}
	now := time.Now()
	p = pause{failures: p.failures + 1, since: now, until: now.Add(d), err: down.err}
	r.pauses[name] = p
	r.mu.Unlock()
	r.log(ctx, slog.LevelWarn, "outbox: transport paused", name,
		slog.String("transport", name), slog.Int("failures", p.failures), slog.Duration("pause", d), slog.Any("error", down.err))
	if r.cfg.Hooks.OnPause != nil {
		r.cfg.Hooks.OnPause(ctx, name, down.err)
	}
}

// endPause is called when a transport has answered to a batch that began at begin, or was not asked
// after all.
func (r *Relay) endPause(ctx context.Context, name string, begin time.Time, answered bool) {
	r.mu.Lock()
	p, was := r.pauses[name]
	if !was || p.since.After(begin) {
		r.mu.Unlock()
		return
	}
	p.trying = false
	r.pauses[name] = p
	if answered {
		delete(r.pauses, name)
	}
	r.mu.Unlock()
	if answered {
		r.log(ctx, slog.LevelInfo, "outbox: transport resumed", name, slog.String("transport", name), slog.Int("failures", p.failures))
	}
}

// forgetPauses drops the pauses that are over, when no message is left to try their transports
// with.
func (r *Relay) forgetPauses(current []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.pauses, func(name string, _ pause) bool { return !slices.Contains(current, name) })
}

// pauses reports whether a failure says something about the transport rather than the message.
func pauses(c driver.Class) bool { return c == driver.Unavailable || c == driver.Blocked }
