package operator

import (
	"context"
	"fmt"
	"slices"
	"time"

	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	outboxdriver "github.com/holdfast-go/holdfast/outbox/driver"
)

// pauseState says who has paused a part, and why.
type pauseState struct {
	By     string    `json:"by"`
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`
}

// pausable is a part that can be paused.
type pausable struct {
	name   string
	pause  func(ctx context.Context, by, reason string) error
	resume func(ctx context.Context) error
	paused func(ctx context.Context) (pauseState, error)
}

// pausableOf returns the pause of a store, or nil.
func pausableOf(name string, store any) *pausable {
	switch s := store.(type) {
	case outboxdriver.Pausable:
		return &pausable{name, s.Pause, s.Resume, func(ctx context.Context) (pauseState, error) {
			p, err := s.Paused(ctx)
			return pauseState(p), err
		}}
	case inboxdriver.Pausable:
		return &pausable{name, s.Pause, s.Resume, func(ctx context.Context) (pauseState, error) {
			p, err := s.Paused(ctx)
			return pauseState(p), err
		}}
	}
	return nil
}

// pausables are the parts that can be paused: outboxes, and consumers with an inbox.
func (o *Operator) pausables() []pausable {
	var all []pausable
	add := func(name string, store any) {
		if p := pausableOf(name, store); p != nil {
			all = append(all, *p)
		}
	}
	for _, b := range o.cfg.Outboxes {
		add(b.Name, b.Store)
	}
	for _, c := range o.cfg.Consumers {
		add(c.Name, c.Inbox)
	}
	return all
}

// pausableNamed returns the part of a name.
func (o *Operator) pausableNamed(name string) (pausable, error) {
	all := o.pausables()
	i := slices.IndexFunc(all, func(p pausable) bool { return p.name == name })
	if i < 0 {
		return pausable{}, fmt.Errorf("%.70q is no outbox, and no consumer with an inbox", name)
	}
	return all[i], nil
}

// state is the pause; nil: there is none, or the part cannot be paused.
func (p *pausable) state(ctx context.Context) (*pauseState, error) {
	if p == nil {
		return nil, nil
	}
	s, err := p.paused(ctx)
	if err != nil || s.Since.IsZero() {
		return nil, err
	}
	return &s, nil
}

// The changes of a pause.
const (
	pausing  = "pause"
	resuming = "resume"
)

// turn pauses or resumes a part, and has it noted.
func (o *Operator) turn(ctx context.Context, what string, p pausable, c change) error {
	if c.DryRun {
		_, err := p.paused(ctx)
		return err
	}
	return o.noted(ctx, Action{What: what, On: p.name, By: c.By, Reason: c.Reason}, func() (int, error) {
		do := p.resume
		if what == pausing {
			do = func(ctx context.Context) error { return p.pause(ctx, c.By, c.Reason) }
		}
		if err := do(ctx); err != nil {
			return 0, err
		}
		return 1, nil
	})
}
