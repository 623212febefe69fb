package operator

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

// prune deletes what is older than its retention.
func (o *Operator) prune() *cobra.Command {
	cmd := &cobra.Command{
		Use: "prune", Short: "Delete records that are older than their retention", Args: noArguments,
		Long: "Delete records that are older than their retention, as running services do by themselves.",
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		type pruned struct {
			Name  string `json:"name"`
			Count int    `json:"count"`
		}
		all := []pruned{}
		var failed []error
		for _, p := range o.cfg.parts() {
			pruner, ok := p.Part.(interface {
				Prune(ctx context.Context) (int, error)
			})
			if !ok {
				continue
			}
			n, err := pruner.Prune(cmd.Context())
			if err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", p.Name, err))
			}
			all = append(all, pruned{p.Name, n})
		}
		if wantsJSON(cmd) {
			return errors.Join(printJSON(cmd, all), errors.Join(failed...))
		}
		t := newTable(cmd.OutOrStdout(), "PART", "DELETED")
		for _, p := range all {
			t.row(p.Name, p.Count)
		}
		return errors.Join(t.flush(), errors.Join(failed...))
	}
	return cmd
}

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
