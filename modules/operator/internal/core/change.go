package core

import (
	"context"
	"errors"
	"fmt"

	"github.com/holdfast-go/holdfast/modules/operator"
)

// Change is who changes dead letters, and how.
type Change struct {
	By, Reason string
	PerSecond  float64
	DryRun     bool
	Force      bool
	// Edit returns the body that a message gets which is tried again. Optional.
	Edit func(operator.MaskedMessage) ([]byte, error)
	// Progress learns how many are done, those that are too old left out. Optional.
	Progress func(done int)
}

// Validate refuses what the log could not keep.
func (c Change) Validate() error {
	switch {
	case len(c.By) > 128 || Plain(c.By) != c.By:
		return errors.New("by must be at most 128 bytes without control characters")
	case len(c.Reason) > 1000 || Plain(c.Reason) != c.Reason:
		return errors.New("reason must be at most 1,000 bytes without control characters")
	case !(c.PerSecond >= 0):
		return errors.New("rate must not be negative")
	}
	return nil
}

// Replayed is what became of letters that were to be tried again.
type Replayed struct{ Returned, Outlived, Failed int }

// editAndRetry is what the log calls a retry that replaced bodies.
const editAndRetry = "edit and retry"

// Changed is what a command has changed in one place. Count are those that it has, Outlived those that
// are too old to be tried again, and Failed those that could not be.
type Changed struct {
	From     string `json:"from"`
	Count    int    `json:"count"`
	Outlived int    `json:"outlived,omitempty"`
	Failed   int    `json:"failed,omitempty"`
	DryRun   bool   `json:"dry_run,omitempty"`
}

// Apply changes what is chosen of one place and has it noted, by the place itself or in the log.
func (o *Operator) Apply(ctx context.Context, what string, p Place, s Selection, c Change) (Replayed, error) {
	do := func() (Replayed, error) {
		switch {
		case what == "retry":
			return p.replay(ctx, s, c)
		case what != "drop":
			return Replayed{}, fmt.Errorf("%.40q is no change", what)
		case c.DryRun:
			n, err := p.Count(ctx, s)
			return Replayed{Returned: n}, err
		}
		n, err := p.remove(ctx, s, c)
		return Replayed{Returned: n}, err
	}
	if c.DryRun || p.keepsLog() {
		return do()
	}
	var r Replayed
	noted := what
	if c.Edit != nil {
		noted = editAndRetry
	}
	err := o.Noted(ctx, operator.Action{What: noted, On: p.Name, Chosen: s.String(), By: c.By, Reason: c.Reason}, func() (int, error) {
		var err error
		r, err = do()
		return r.Returned, err
	})
	return r, err
}

// Noted does something and keeps in the log that it was done. What cannot be noted is not begun.
func (o *Operator) Noted(ctx context.Context, a operator.Action, do func() (int, error)) error {
	if o.Config.Log == nil {
		_, err := do()
		return err
	}
	number, err := o.Config.Log.Begin(ctx, a)
	if err != nil {
		return err
	}
	n, err := do()
	failure := ""
	if err != nil {
		failure = Short(Plain(OneLine(err)), 1000) // a NUL could not be kept
	}
	return errors.Join(err, o.Config.Log.End(context.WithoutCancel(ctx), number, n, failure))
}
