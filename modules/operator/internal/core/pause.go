package core

import (
	"context"
	"fmt"
	"slices"
	"time"

	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/modules/operator"
	outboxdriver "github.com/holdfast-go/holdfast/outbox/driver"
)

// Turned is one part that was paused or resumed.
type Turned struct {
	Part   string `json:"part"`
	Paused bool   `json:"paused"`
	DryRun bool   `json:"dry_run,omitempty"`
}

// pauseState says who has paused a part, and why.
type pauseState struct {
	By     string    `json:"by"`
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`
}

// Pausable is a part that can be paused.
type Pausable struct {
	Name   string
	pause  func(ctx context.Context, by, reason string) error
	resume func(ctx context.Context) error
	paused func(ctx context.Context) (pauseState, error)
}

// pausableOf returns the pause of a store, or nil.
func pausableOf(name string, store any) *Pausable {
	switch s := store.(type) {
	case outboxdriver.Pausable:
		return &Pausable{name, s.Pause, s.Resume, func(ctx context.Context) (pauseState, error) {
			p, err := s.Paused(ctx)
			return pauseState(p), err
		}}
	case inboxdriver.Pausable:
		return &Pausable{name, s.Pause, s.Resume, func(ctx context.Context) (pauseState, error) {
			p, err := s.Paused(ctx)
			return pauseState(p), err
		}}
	}
	return nil
}

// Pausables are the parts that can be paused: outboxes, and consumers with an inbox.
func (o *Operator) Pausables() []Pausable {
	var all []Pausable
	add := func(name string, store any) {
		if p := pausableOf(name, store); p != nil {
			all = append(all, *p)
		}
	}
	for _, b := range o.Config.Outboxes {
		add(b.Name, b.Store)
	}
	for _, c := range o.Config.Consumers {
		add(c.Name, c.Inbox)
	}
	return all
}

// PausableNamed returns the part of a name.
func (o *Operator) PausableNamed(name string) (Pausable, error) {
	all := o.Pausables()
	i := slices.IndexFunc(all, func(p Pausable) bool { return p.Name == name })
	if i < 0 {
		return Pausable{}, fmt.Errorf("%.70q is no outbox, and no consumer with an inbox", name)
	}
	return all[i], nil
}

// state is the pause; nil: there is none, or the part cannot be paused.
func (p *Pausable) state(ctx context.Context) (*pauseState, error) {
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
	Pausing  = "pause"
	Resuming = "resume"
)

// Turn pauses or resumes a part, and has it noted.
func (o *Operator) Turn(ctx context.Context, what string, p Pausable, c Change) error {
	if c.DryRun {
		_, err := p.paused(ctx)
		return err
	}
	return o.Noted(ctx, operator.Action{What: what, On: p.Name, By: c.By, Reason: c.Reason}, func() (int, error) {
		do := p.resume
		if what == Pausing {
			do = func(ctx context.Context) error { return p.pause(ctx, c.By, c.Reason) }
		}
		if err := do(ctx); err != nil {
			return 0, err
		}
		return 1, nil
	})
}
