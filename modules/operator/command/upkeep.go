package command

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
)

// pruner is a part whose records have a retention.
type pruner interface {
	Prune(ctx context.Context) (int, error)
}

// prunable is a pruner that tells how much it would delete.
type prunable interface {
	Prunable(ctx context.Context) (int, error)
}

// pruned is how many records of a part are deleted, or would be.
type pruned struct {
	Name string `json:"name"`
	// Count is null where the part does not tell.
	Count  *int `json:"count"`
	DryRun bool `json:"dry_run,omitempty"`
}

// prune deletes what is older than its retention.
func (o *commands) prune() *cobra.Command {
	cmd := &cobra.Command{
		Use: "prune", Short: "Delete records that are older than their retention", Args: noArguments,
		Long: "Delete records that are older than their retention, as running services do by themselves.",
	}
	flags := addNotedFlags(cmd, "only tell how many there are; of each kind 100,000 are counted at most")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := flags.change()
		if err != nil {
			return err
		}
		all := []pruned{} // not null in JSON
		var failed []error
		for _, part := range o.Parts() {
			p, ok := part.Part.(pruner)
			if !ok {
				continue
			}
			done := atWork(cmd, part.Name)
			one, err := o.pruneOne(cmd, part.Name, p, c)
			done()
			if err != nil {
				failed = append(failed, fmt.Errorf("%s: %w", part.Name, err))
			}
			all = append(all, one)
		}
		return errors.Join(printPruned(cmd, all, c.DryRun), errors.Join(failed...))
	}
	return cmd
}

func (o *commands) pruneOne(cmd *cobra.Command, name string, p pruner, c core.Change) (pruned, error) {
	if c.DryRun {
		tells, ok := p.(prunable)
		if !ok {
			return pruned{Name: name, DryRun: true}, nil
		}
		n, err := tells.Prunable(cmd.Context())
		return pruned{name, &n, true}, err
	}
	n := 0
	err := o.upkeepNoted(cmd, operator.Action{What: "prune", On: name, By: c.By, Reason: c.Reason}, func() (_ int, err error) {
		n, err = p.Prune(cmd.Context())
		return n, err
	})
	return pruned{name, &n, false}, err
}

func printPruned(cmd *cobra.Command, all []pruned, dry bool) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, all)
	}
	head := "DELETED"
	if dry {
		head = "WOULD BE DELETED"
	}
	t := newTable(cmd.OutOrStdout(), "PART", head)
	for _, p := range all {
		if p.Count == nil {
			t.row(p.Name, "it does not tell")
			continue
		}
		t.row(p.Name, *p.Count)
	}
	return t.flush()
}

// setup creates or updates tables, queues and streams.
func (o *commands) setup() *cobra.Command {
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
func (o *commands) setUp(cmd *cobra.Command, c core.Change) (done []string, err error) {
	ctx := cmd.Context()
	steps := o.steps()
	names := core.Mapped(steps, func(s step) string { return s.name })
	if c.DryRun {
		return names, nil
	}
	if log, ok := o.Config.Log.(migrator); ok {
		if err := log.Migrate(ctx); err != nil {
			return nil, fmt.Errorf("log: %w", err)
		}
	}
	a := operator.Action{What: "setup", On: "all parts", Chosen: strings.Join(names, ", "), By: c.By, Reason: c.Reason}
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
	return names, o.Noted(ctx, a, do)
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
func (o *commands) steps() []step {
	var tables, brokers []step
	for _, p := range o.Parts() {
		if m, ok := p.Part.(migrator); ok {
			tables = append(tables, step{p.Name + ": tables", m.Migrate})
		}
		if b, ok := p.Part.(interface{ Setup(context.Context) error }); ok {
			brokers = append(brokers, step{p.Name + ": broker", b.Setup})
		}
	}
	return append(tables, brokers...)
}
