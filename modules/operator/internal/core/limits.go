package core

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// near is the part of a limit that is left where it counts as near its edge.
const near = 0.1

// Near says that little is left of the limit.
func (l LimitState) Near() bool { return float64(l.Remaining) <= near*float64(l.Max) }

// lookAtLimits asks for the callers that the status shows, those first that have least left.
func (o *Operator) lookAtLimits(ctx context.Context) (states []LimitState, failed []string) {
	states = []LimitState{} // not null in JSON
	for _, l := range o.Config.Limiters {
		for _, limit := range l.Limits {
			for _, key := range l.Keys {
				found, err := peek(ctx, l, limit, key)
				if err != nil {
					failed = append(failed, OneLine(err))
				}
				states = append(states, found...)
			}
		}
	}
	left := func(l LimitState) float64 { return float64(l.Remaining) / float64(l.Max) }
	slices.SortStableFunc(states, func(a, b LimitState) int { return cmp.Compare(left(a), left(b)) })
	return states, failed
}

// LimitState is one limit of one caller.
type LimitState struct {
	Limiter   string  `json:"limiter"`
	Limit     string  `json:"limit"`
	Key       string  `json:"key"`
	Max       int64   `json:"max"`
	Window    float64 `json:"window_seconds"`
	Remaining int64   `json:"remaining"`
	Reset     float64 `json:"reset_seconds"`
}

// LimitStates are what the caller of a key has left of the limits of a name, or of all. They are nil for
// a name that there is not.
func (o *Operator) LimitStates(ctx context.Context, only, key string) ([]LimitState, error) {
	states := []LimitState{}
	var failed []error
	err := o.eachLimit(only, func(l operator.Limiter, limit ratelimit.Limit) error {
		found, err := peek(ctx, l, limit, key)
		if err != nil {
			failed = append(failed, err)
		}
		states = append(states, found...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return states, errors.Join(failed...)
}

// peek is what the caller of a key has left of one limit.
func peek(ctx context.Context, l operator.Limiter, limit ratelimit.Limit, key string) (states []LimitState, err error) {
	d, err := l.Limiter.Peek(ctx, ratelimit.Charge{Limit: limit, Key: key})
	if err == nil && d.Fallback {
		err = errors.New("the store could not be asked")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", l.Name, limit.Name, err)
	}
	for _, s := range d.Limits() {
		if d.Allowed {
			s.Remaining++ // a look is answered as if its unit had been taken
		}
		states = append(states, LimitState{l.Name, s.Name, key, s.Max, s.Window.Seconds(), s.Remaining, s.Reset.Seconds()})
	}
	return states, nil
}

// LimitReset is one limit of one caller whose use was forgotten.
type LimitReset struct {
	Limiter string `json:"limiter"`
	Limit   string `json:"limit"`
	Key     string `json:"key"`
	DryRun  bool   `json:"dry_run,omitempty"`
}

// ResetLimits forgets what the caller of a key has used of the limits of a name, or of all.
func (o *Operator) ResetLimits(ctx context.Context, only, key string, c Change) ([]LimitReset, error) {
	done := []LimitReset{}
	err := o.eachLimit(only, func(l operator.Limiter, limit ratelimit.Limit) error {
		if !c.DryRun {
			if err := o.resetLimit(ctx, l, limit, key, c); err != nil {
				return err
			}
		}
		done = append(done, LimitReset{l.Name, limit.Name, key, c.DryRun})
		return nil
	})
	return done, err
}

func (o *Operator) resetLimit(ctx context.Context, l operator.Limiter, limit ratelimit.Limit, key string, c Change) error {
	a := operator.Action{What: "limits reset", On: l.Name, Chosen: fmt.Sprintf("--limit=%s %s", limit.Name, key), By: c.By, Reason: c.Reason}
	return o.Noted(ctx, a, func() (int, error) {
		if err := l.Limiter.Reset(ctx, ratelimit.Charge{Limit: limit, Key: key}); err != nil {
			return 0, err
		}
		return 1, nil
	})
}

// eachLimit visits the limits of a name, or all; none is a mistake.
func (o *Operator) eachLimit(name string, visit func(operator.Limiter, ratelimit.Limit) error) error {
	found := false
	for _, l := range o.Config.Limiters {
		for _, limit := range l.Limits {
			if cmp.Or(name, limit.Name) != limit.Name {
				continue
			}
			found = true
			if err := visit(l, limit); err != nil {
				return fmt.Errorf("%s: %s: %w", l.Name, limit.Name, err)
			}
		}
	}
	switch {
	case found:
		return nil
	case name == "":
		return Mistakef("there are no limits here")
	default:
		return Mistakef("there is no limit %.40q", name)
	}
}
