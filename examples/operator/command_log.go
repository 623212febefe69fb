package operator

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// auditor is a store that keeps by itself who has changed its dead letters.
type auditor interface {
	Audit(ctx context.Context, limit int) ([]outboxpgx.AuditEntry, error)
}

// log lists what operators did.
func (o *Operator) log() *cobra.Command {
	cmd := &cobra.Command{Use: "log", Short: "List what operators did, the newest first", Args: noArguments}
	var f LogFilter
	cmd.Flags().IntVar(&f.Limit, "limit", listed, "the newest so many")
	cmd.Flags().BoolVar(&f.WithoutUpkeep, "without-upkeep", false, "only what services do not do by themselves: no sweep, prune and setup")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if f.Limit < 1 {
			return usagef("log: --limit must be at least 1")
		}
		actions, failed := o.actions(cmd.Context(), f)
		return errors.Join(printActions(cmd, actions), failed)
	}
	return cmd
}

// actions are the newest, of the log and of the outboxes that keep their own.
func (o *Operator) actions(ctx context.Context, f LogFilter) ([]Action, error) {
	all := []Action{}
	var failed []error
	if o.cfg.Log != nil {
		noted, err := o.cfg.Log.List(ctx, f)
		all, failed = append(all, noted...), append(failed, err)
	}
	for _, b := range o.cfg.Outboxes {
		store, ok := b.Store.(auditor)
		if !ok {
			continue
		}
		entries, err := store.Audit(ctx, f.Limit)
		failed = append(failed, err)
		for _, e := range entries {
			all = append(all, auditAction(b.Name, e))
		}
	}
	slices.SortStableFunc(all, func(a, b Action) int { return b.At.Compare(a.At) })
	return all[:min(f.Limit, len(all))], errors.Join(failed...)
}

func auditAction(name string, e outboxpgx.AuditEntry) Action {
	what := map[string]string{"replay": "retry", "edit": editAndRetry, "remove": "drop"}[e.Action]
	if what == "" {
		what = e.Action
	}
	return Action{At: e.At, What: what, On: name, Chosen: selectionOf(e.Filter).String(), By: e.By, Reason: e.Reason, Count: &e.Count}
}

func selectionOf(f outbox.Filter) selection {
	return selection{
		IDs: f.IDs, Name: f.Name, Key: f.Key, Class: f.Class, Group: f.Fingerprint, ErrorContains: f.ErrorContains,
		After: f.FailedAfter, Before: f.FailedBefore, Limit: f.Limit,
	}
}

func printActions(cmd *cobra.Command, actions []Action) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, actions)
	}
	t := newTable(cmd.OutOrStdout(), "AT", "WHAT", "ON", "COUNT", "BY", "REASON", "CHOSEN", "FAILURE")
	for _, a := range actions {
		count := "unknown"
		if a.Count != nil {
			count = fmt.Sprint(*a.Count)
		}
		t.row(moment(a.At), a.What, a.On, count, a.By, a.Reason, short(a.Chosen, 120), short(a.Failure, 80))
	}
	return t.flush()
}
