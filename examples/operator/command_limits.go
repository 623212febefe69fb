package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// limits shows and resets what callers have used of their limits.
func (o *Operator) limits() *cobra.Command {
	return parent("limits", "What a caller has left of the rate limits", o.limitsShow(), o.limitsReset())
}

// limitState is one limit of one caller.
type limitState struct {
	Limiter   string  `json:"limiter"`
	Limit     string  `json:"limit"`
	Key       string  `json:"key"`
	Max       int64   `json:"max"`
	Window    float64 `json:"window_seconds"`
	Remaining int64   `json:"remaining"`
	Reset     float64 `json:"reset_seconds"`
}

func (o *Operator) limitsShow() *cobra.Command {
	cmd := &cobra.Command{Use: "show KEY", Short: "Show what the caller of a key has left", Args: oneKey}
	only := o.addLimit(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		states, err := o.limitStates(cmd.Context(), *only, args[0])
		if states == nil {
			return err
		}
		return errors.Join(printLimits(cmd, states), err)
	}
	return cmd
}

// addLimit adds --limit to a command about the caller of a key, and completes both.
func (o *Operator) addLimit(cmd *cobra.Command) *string {
	var names, keys []string
	for _, l := range o.cfg.Limiters {
		names = append(names, mapped(l.Limits, func(limit ratelimit.Limit) string { return limit.Name })...)
		keys = append(keys, l.Keys...)
	}
	only := cmd.Flags().String("limit", "", "only the limit of this `name`")
	complete(cmd, "limit", among(names))
	cmd.ValidArgsFunction = first(among(keys))
	return only
}

// limitStates are what the caller of a key has left of the limits of a name, or of all. They are nil for
// a name that there is not.
func (o *Operator) limitStates(ctx context.Context, only, key string) ([]limitState, error) {
	states := []limitState{}
	var failed []error
	err := o.eachLimit(only, func(l Limiter, limit ratelimit.Limit) error {
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
func peek(ctx context.Context, l Limiter, limit ratelimit.Limit, key string) (states []limitState, err error) {
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
		states = append(states, limitState{l.Name, s.Name, key, s.Max, s.Window.Seconds(), s.Remaining, s.Reset.Seconds()})
	}
	return states, nil
}

func printLimits(cmd *cobra.Command, states []limitState) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, states)
	}
	t := newTable(cmd.OutOrStdout(), "LIMITER", "LIMIT", "MAX", "PER", "REMAINING", "MORE IN")
	for _, s := range states {
		t.row(s.Limiter, s.Limit, s.Max, age(s.Window), s.Remaining, age(s.Reset))
	}
	return t.flush()
}

func (o *Operator) limitsReset() *cobra.Command {
	cmd := &cobra.Command{Use: "reset KEY", Short: "Forget what the caller of a key has used", Args: oneKey}
	only := o.addLimit(cmd)
	flags := addChangeFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		done, err := o.resetLimits(cmd.Context(), *only, args[0], c)
		return errors.Join(printResets(cmd, done), err)
	}
	return cmd
}

// limitReset is one limit of one caller whose use was forgotten.
type limitReset struct {
	Limiter string `json:"limiter"`
	Limit   string `json:"limit"`
	Key     string `json:"key"`
	DryRun  bool   `json:"dry_run,omitempty"`
}

// resetLimits forgets what the caller of a key has used of the limits of a name, or of all.
func (o *Operator) resetLimits(ctx context.Context, only, key string, c change) ([]limitReset, error) {
	done := []limitReset{}
	err := o.eachLimit(only, func(l Limiter, limit ratelimit.Limit) error {
		if !c.DryRun {
			if err := o.resetLimit(ctx, l, limit, key, c); err != nil {
				return err
			}
		}
		done = append(done, limitReset{l.Name, limit.Name, key, c.DryRun})
		return nil
	})
	return done, err
}

func (o *Operator) resetLimit(ctx context.Context, l Limiter, limit ratelimit.Limit, key string, c change) error {
	a := Action{What: "limits reset", On: l.Name, Chosen: fmt.Sprintf("--limit=%s %s", limit.Name, key), By: c.By, Reason: c.Reason}
	return o.noted(ctx, a, func() (int, error) {
		if err := l.Limiter.Reset(ctx, ratelimit.Charge{Limit: limit, Key: key}); err != nil {
			return 0, err
		}
		return 1, nil
	})
}

func printResets(cmd *cobra.Command, done []limitReset) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, done)
	}
	for _, r := range done {
		verb := "is reset"
		if r.DryRun {
			verb = "would be reset"
		}
		fmt.Fprintf(cmd.OutOrStdout(), "%s: %s %s\n", r.Limiter, r.Limit, verb)
	}
	return nil
}

func oneKey(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usagef("%s: say the key of one caller", cmd.CommandPath())
	}
	return nil
}

// eachLimit visits the limits of a name, or all; none is a mistake.
func (o *Operator) eachLimit(name string, visit func(Limiter, ratelimit.Limit) error) error {
	found := false
	for _, l := range o.cfg.Limiters {
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
		return usagef("there are no limits here")
	default:
		return usagef("there is no limit %.40q", name)
	}
}
