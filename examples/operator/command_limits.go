package operator

import (
	"cmp"
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
	only := cmd.Flags().String("limit", "", "only the limit of this `name`")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		states := []limitState{}
		var failed []error
		err := o.eachLimit(*only, func(l Limiter, limit ratelimit.Limit) error {
			d, err := l.Limiter.Peek(cmd.Context(), ratelimit.Charge{Limit: limit, Key: args[0]})
			if err == nil && d.Fallback {
				err = errors.New("the store could not be asked")
			}
			if err != nil {
				failed = append(failed, fmt.Errorf("%s: %s: %w", l.Name, limit.Name, err))
				return nil
			}
			for _, s := range d.Limits() {
				if d.Allowed {
					s.Remaining++ // a look is answered as if its unit had been taken
				}
				states = append(states, limitState{l.Name, s.Name, args[0], s.Max, s.Window.Seconds(), s.Remaining, s.Reset.Seconds()})
			}
			return nil
		})
		if err != nil {
			return err
		}
		return errors.Join(printLimits(cmd, states), errors.Join(failed...))
	}
	return cmd
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
	only := cmd.Flags().String("limit", "", "only the limit of this `name`")
	flags := addChangeFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		return o.eachLimit(*only, func(l Limiter, limit ratelimit.Limit) error {
			if c.DryRun {
				fmt.Fprintf(cmd.OutOrStdout(), "%s: %s would be reset\n", l.Name, limit.Name)
				return nil
			}
			err := o.noted(cmd.Context(), Action{What: "limits reset", On: l.Name, Chosen: limit.Name, By: c.By, Reason: c.Reason}, func() (int, error) {
				return 1, l.Limiter.Reset(cmd.Context(), ratelimit.Charge{Limit: limit, Key: args[0]})
			})
			if err == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "%s: %s is reset\n", l.Name, limit.Name)
			}
			return err
		})
	}
	return cmd
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
	if !found {
		return usagef("there is no limit %.40q", name)
	}
	return nil
}
