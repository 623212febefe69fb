package core

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// near is the share of a limit below which it counts as nearly used up.
const near = 0.1

// Near reports whether little is left of the limit.
func (l LimitState) Near() bool { return float64(l.Remaining) <= near*float64(l.Max) }

// readLimits returns the limits of the callers in Limiter.Keys. Those with the least left come first.
func (o *Operator) readLimits(ctx context.Context) (states []LimitState, failed []string) {
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

// LimitStates returns the limits of the caller of a key. only limits them to one name. They are nil if there is no
// limit of that name.
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

// peek returns the state of one limit for the caller of a key.
func peek(ctx context.Context, l operator.Limiter, limit ratelimit.Limit, key string) (states []LimitState, err error) {
	d, err := l.Limiter.Peek(ctx, ratelimit.Charge{Limit: limit, Key: key})
	if err == nil && d.Fallback {
		err = errors.New("the store is unavailable")
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %s: %w", l.Name, limit.Name, err)
	}
	for _, s := range d.Limits() {
		if d.Allowed {
			s.Remaining++ // Peek answers as if its unit had been charged
		}
		states = append(states, LimitState{l.Name, s.Name, key, s.Max, s.Window.Seconds(), s.Remaining, s.Reset.Seconds()})
	}
	return states, nil
}

// LimitReset is one limit of one caller that was reset.
type LimitReset struct {
	Limiter string `json:"limiter"`
	Limit   string `json:"limit"`
	Key     string `json:"key"`
	DryRun  bool   `json:"dry_run,omitempty"`
}

// ResetLimits resets the limits of the caller of a key. only limits them to one name.
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

// eachLimit visits the limits with that name, or all. It returns a Mistake if there are none.
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

// looker is a part that returns the state of an idempotency key.
type looker interface {
	Look(ctx context.Context, key driver.Key) (driver.Known, error)
}

// KnownKey is the state of a key in one part, without the key itself.
type KnownKey struct {
	Part  string    `json:"part"`
	State string    `json:"state"`
	Since time.Time `json:"since,omitzero"`
	// Left is for how many seconds the state lasts; 0: unknown.
	Left        float64 `json:"left_seconds"`
	Fingerprint string  `json:"fingerprint,omitempty"`
	Status      int     `json:"status,omitempty"` // of HTTP
	Bytes       int     `json:"body_bytes,omitempty"`
	Body        string  `json:"body,omitempty"`
	BodyBase64  string  `json:"body_base64,omitempty"` // of a body that is no text
}

// ReadKey returns the state of a key in every store of idempotency keys, with the stored answer if body is true. It continues
// after a store that fails.
func (o *Operator) ReadKey(ctx context.Context, key driver.Key, body bool) ([]KnownKey, error) {
	found := []KnownKey{} // not null in JSON
	var failed []error
	for _, p := range o.Parts() {
		store, ok := p.Part.(looker)
		if !ok {
			continue
		}
		known, err := store.Look(ctx, key)
		if err != nil {
			failed = append(failed, fmt.Errorf("%s: %w", p.Name, err))
			continue
		}
		found = append(found, knownAt(p.Name, known, body))
	}
	return found, errors.Join(failed...)
}

// KeyStates are the names of a key's states.
var KeyStates = map[driver.State]string{0: "free", driver.InProgress: "in flight", driver.Completed: "done"}

func knownAt(part string, known driver.Known, body bool) KnownKey {
	k := KnownKey{
		Part: part, State: KeyStates[known.State], Since: known.Since, Left: known.Left.Seconds(),
		Fingerprint: known.Fingerprint.Sum, Status: known.Response.Status, Bytes: len(known.Response.Body),
	}
	switch {
	case !body:
	case utf8.Valid(known.Response.Body):
		k.Body = string(known.Response.Body)
	default:
		k.BodyBase64 = base64.StdEncoding.EncodeToString(known.Response.Body)
	}
	return k
}
