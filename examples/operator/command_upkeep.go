package operator

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

// setup creates or updates tables, queues and streams.
func (o *Operator) setup() *cobra.Command {
	cmd := &cobra.Command{
		Use: "setup", Short: "Create what is missing of tables, queues and streams", Args: noArguments,
		Long: "Create what is missing of tables, queues and streams. What exists is left as it is, so that it may run before every start.",
	}
	flags := addNotedFlags(cmd, "only tell which parts would be set up")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		done, err := o.setUp(cmd, c)
		if err != nil {
			return err
		}
		if wantsJSON(cmd) {
			return printJSON(cmd, done)
		}
		for _, name := range done {
			if c.DryRun {
				name += " would be set up"
			}
			fmt.Fprintln(cmd.OutOrStdout(), name)
		}
		return nil
	}
	return cmd
}

// setUp does the steps. It is noted where somebody says who or why, in a log whose own table is there before all others: what
// runs before every start mostly finds nothing to do.
func (o *Operator) setUp(cmd *cobra.Command, c change) (done []string, err error) {
	ctx := cmd.Context()
	steps := o.steps()
	names := mapped(steps, func(s step) string { return s.name })
	if c.DryRun {
		return names, nil
	}
	if log, ok := o.cfg.Log.(migrator); ok {
		if err := log.Migrate(ctx); err != nil {
			return nil, fmt.Errorf("log: %w", err)
		}
	}
	a := Action{What: "setup", On: "all parts", Chosen: strings.Join(names, ", "), By: c.By, Reason: c.Reason}
	do := func() (int, error) {
		for i, step := range steps {
			if err := step.do(ctx); err != nil {
				return i, fmt.Errorf("%s: %w", step.name, err)
			}
		}
		return len(steps), nil
	}
	if !attended(cmd) {
		_, err = do()
		return names, err
	}
	return names, o.noted(ctx, a, do)
}

// migrator is a part that makes its own tables.
type migrator interface {
	Migrate(ctx context.Context) error
}

type step struct {
	name string
	do   func(context.Context) error
}

// steps are those of setup: all tables, then what brokers need.
func (o *Operator) steps() []step {
	var tables, brokers []step
	for _, p := range o.cfg.parts() {
		if m, ok := p.Part.(migrator); ok {
			tables = append(tables, step{p.Name + ": tables", m.Migrate})
		}
		if b, ok := p.Part.(interface{ Setup(context.Context) error }); ok {
			brokers = append(brokers, step{p.Name + ": broker", b.Setup})
		}
	}
	return append(tables, brokers...)
}
