package operator

import (
	"context"
	"errors"
	"slices"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/outbox"
)

// lister is a store that shows the messages that are not published.
type lister interface {
	Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error)
}

// waiting lists messages that are not published.
func (o *Operator) waiting(use, short string, parked bool) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noArguments}
	from := o.addFrom(cmd, kindOutbox)
	f := outbox.WaitingFilter{Parked: parked}
	cmd.Flags().StringVar(&f.Name, "name", "", "only messages of this `name`")
	cmd.Flags().StringVar(&f.Key, "key", "", "only messages of this ordering `key`")
	cmd.Flags().IntVar(&f.Limit, "limit", listed, "at most so many of each outbox")
	after := addAfter(cmd)
	complete(cmd, "name", o.completingWaiting(parked, func(l letter) string { return l.Name }))
	complete(cmd, "key", o.completingWaiting(parked, func(l letter) string { return l.Key }))
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if f.Limit < 1 {
			return usagef("%s: --limit must be at least 1", cmd.CommandPath())
		}
		places, err := o.chosen(from, kindOutbox)
		if err != nil {
			return err
		}
		if f.After, err = after.cursor(cmd, places); err != nil {
			return err
		}
		letters, failed := eachPlace(cmd.Context(), places, func(ctx context.Context, p place) ([]letter, error) { return o.waitingAt(ctx, p.name, f) })
		err = printWaiting(cmd, letters)
		printMore(cmd, places, letters, f.Limit)
		return errors.Join(err, failed)
	}
	return cmd
}

// waitingAt asks the outbox of a name.
func (o *Operator) waitingAt(ctx context.Context, name string, f outbox.WaitingFilter) ([]letter, error) {
	i := slices.IndexFunc(o.cfg.Outboxes, func(b Outbox) bool { return b.Name == name })
	store, ok := o.cfg.Outboxes[i].Store.(lister)
	if !ok {
		return nil, errors.New("the store does not tell")
	}
	found, err := store.Waiting(ctx, f)
	return mapped(found, func(w outbox.Waiting) letter {
		return letter{
			From: name, ID: w.ID, Name: w.Name, Key: w.Key, Class: w.Class, Error: w.Error, Attempts: w.Attempts,
			Transport: w.Transport, CreatedAt: told(w.CreatedAt), DueAt: told(w.DueAt), Unreadable: textOf(w.Unreadable), Cursor: w.Cursor,
		}
	}), err
}

// parker is an inbox that counts the messages behind a dead letter.
type parker interface {
	Behind(ctx context.Context, key string) (int, error)
}

// behind are the messages of a key that wait behind a dead letter: those of an outbox, and the number of those of a
// consumer.
func (o *Operator) behind(ctx context.Context, at place, key string) (waiting []letter, parked int, err error) {
	if key == "" {
		return nil, 0, nil
	}
	if at.kind == kindOutbox {
		waiting, err = o.waitingAt(ctx, at.name, outbox.WaitingFilter{Key: key})
		return waiting, 0, err
	}
	i := slices.IndexFunc(o.cfg.Consumers, func(c Consumer) bool { return c.Name == at.name })
	if inbox, ok := o.cfg.Consumers[i].Inbox.(parker); ok {
		parked, err = inbox.Behind(ctx, key)
	}
	return nil, parked, err
}

func printWaiting(cmd *cobra.Command, letters []letter) error {
	if wantsJSON(cmd) {
		return printJSON(cmd, letters)
	}
	t := newTable(cmd.OutOrStdout(), "FROM", "ID", "NAME", "KEY", "STORED", "DUE", "ATTEMPTS", "ERROR")
	for _, l := range letters {
		t.row(l.From, l.ID, l.Name, short(l.Key, 24), moment(l.CreatedAt), moment(l.DueAt), l.Attempts, short(l.Error, 80))
	}
	return t.flush()
}
