package operator

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
)

// setup creates or updates tables, queues and streams.
func (o *Operator) setup() *cobra.Command {
	cmd := &cobra.Command{
		Use: "setup", Short: "Create what is missing of tables, queues and streams", Args: noArguments,
		Long: "Create what is missing of tables, queues and streams. What exists is left as it is, so that it may run before every start.",
	}
	dry := cmd.Flags().Bool("dry-run", false, "only tell which parts would be set up")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		done := []string{}
		for _, step := range o.steps() {
			if !*dry {
				if err := step.do(cmd.Context()); err != nil {
					return fmt.Errorf("%s: %w", step.name, err)
				}
			}
			done = append(done, step.name)
		}
		if wantsJSON(cmd) {
			return printJSON(cmd, done)
		}
		for _, name := range done {
			if *dry {
				name += " would be set up"
			}
			fmt.Fprintln(cmd.OutOrStdout(), name)
		}
		return nil
	}
	return cmd
}

type step struct {
	name string
	do   func(context.Context) error
}

// steps are those of setup: all tables, then what brokers need.
func (o *Operator) steps() []step {
	var tables, brokers []step
	for _, p := range o.cfg.parts() {
		if m, ok := p.Part.(interface{ Migrate(context.Context) error }); ok {
			tables = append(tables, step{p.Name + ": tables", m.Migrate})
		}
		if b, ok := p.Part.(interface{ Setup(context.Context) error }); ok {
			brokers = append(brokers, step{p.Name + ": broker", b.Setup})
		}
	}
	return append(tables, brokers...)
}
