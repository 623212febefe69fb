package core

import (
	"context"
	"errors"
	"slices"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox"
)

// lister is a store that shows the messages that are not published.
type lister interface {
	Waiting(ctx context.Context, f outbox.WaitingFilter) ([]outbox.Waiting, error)
}

// WaitingAt asks the outbox of a name.
func (o *Operator) WaitingAt(ctx context.Context, name string, f outbox.WaitingFilter) ([]Letter, error) {
	i := slices.IndexFunc(o.Config.Outboxes, func(b operator.Outbox) bool { return b.Name == name })
	store, ok := o.Config.Outboxes[i].Store.(lister)
	if !ok {
		return nil, errors.New("the store does not tell")
	}
	found, err := store.Waiting(ctx, f)
	return Mapped(found, func(w outbox.Waiting) Letter {
		return Letter{
			From: name, ID: w.ID, Name: w.Name, Key: w.Key, Class: w.Class, Error: w.Error, Attempts: w.Attempts,
			Transport: w.Transport, CreatedAt: told(w.CreatedAt), DueAt: told(w.DueAt), Unreadable: TextOf(w.Unreadable), Cursor: w.Cursor,
		}
	}), err
}

// parker is an inbox that counts the messages behind a dead letter.
type parker interface {
	Behind(ctx context.Context, key string) (int, error)
}

// Behind are the messages of a key that wait behind a dead letter: those of an outbox, and the number of those of a
// consumer.
func (o *Operator) Behind(ctx context.Context, at Place, key string) (waiting []Letter, parked int, err error) {
	if key == "" {
		return nil, 0, nil
	}
	if at.Kind == KindOutbox {
		waiting, err = o.WaitingAt(ctx, at.Name, outbox.WaitingFilter{Key: key})
		return waiting, 0, err
	}
	i := slices.IndexFunc(o.Config.Consumers, func(c operator.Consumer) bool { return c.Name == at.Name })
	if inbox, ok := o.Config.Consumers[i].Inbox.(parker); ok {
		parked, err = inbox.Behind(ctx, key)
	}
	return nil, parked, err
}
