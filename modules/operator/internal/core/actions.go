package core

import (
	"context"
	"errors"
	"slices"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// auditor is a store that keeps by itself who has changed its dead letters.
type auditor interface {
	Audit(ctx context.Context, limit int) ([]outboxpgx.AuditEntry, error)
}

// Actions are the newest, of the log and of the outboxes that keep their own.
func (o *Operator) Actions(ctx context.Context, f operator.LogFilter) ([]operator.Action, error) {
	all := []operator.Action{}
	var failed []error
	if o.Config.Log != nil {
		noted, err := o.Config.Log.List(ctx, f)
		all, failed = append(all, noted...), append(failed, err)
	}
	for _, b := range o.Config.Outboxes {
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
	slices.SortStableFunc(all, func(a, b operator.Action) int { return b.At.Compare(a.At) })
	return all[:min(f.Limit, len(all))], errors.Join(failed...)
}

func auditAction(name string, e outboxpgx.AuditEntry) operator.Action {
	what := map[string]string{"replay": "retry", "edit": editAndRetry, "remove": "drop"}[e.Action]
	if what == "" {
		what = e.Action
	}
	return operator.Action{At: e.At, What: what, On: name, Chosen: Flags(e.Filter), By: e.By, Reason: e.Reason, Count: &e.Count}
}

// Noted does something and keeps in the log that it was done. What cannot be noted is not begun.
func (o *Operator) Noted(ctx context.Context, a operator.Action, do func() (int, error)) error {
	if o.Config.Log == nil {
		_, err := do()
		return err
	}
	number, err := o.Config.Log.Begin(ctx, a)
	if err != nil {
		return err
	}
	n, err := do()
	failure := ""
	if err != nil {
		failure = Short(Plain(OneLine(err)), 1000) // a NUL could not be kept
	}
	return errors.Join(err, o.Config.Log.End(context.WithoutCancel(ctx), number, n, failure))
}
