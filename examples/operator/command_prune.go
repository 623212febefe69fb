package operator

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
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
func (o *Operator) prune() *cobra.Command {
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
		for _, part := range o.cfg.parts() {
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

func (o *Operator) pruneOne(cmd *cobra.Command, name string, p pruner, c change) (pruned, error) {
	if c.DryRun {
		tells, ok := p.(prunable)
		if !ok {
			return pruned{Name: name, DryRun: true}, nil
		}
		n, err := tells.Prunable(cmd.Context())
		return pruned{name, &n, true}, err
	}
	n := 0
	err := o.upkeepNoted(cmd, Action{What: "prune", On: name, By: c.By, Reason: c.Reason}, func() (_ int, err error) {
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
