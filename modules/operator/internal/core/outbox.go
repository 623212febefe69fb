package core

import (
	"context"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/outbox"
)

// outboxShelf has the messages that could not be published.
type outboxShelf struct {
	name    string
	letters outbox.DeadLetters
	audits  bool
}

func (o outboxShelf) keepsLog() bool { return o.audits }

func (o outboxShelf) List(ctx context.Context, s Selection, whole bool) ([]Letter, error) {
	found, err := o.letters.List(ctx, outboxFilter(s))
	return Mapped(found, func(d outbox.DeadLetter) Letter { return o.letter(d, whole) }), err
}

func (o outboxShelf) letter(d outbox.DeadLetter, whole bool) Letter {
	l := Letter{
		From: o.name, ID: d.Message.ID, Name: d.Message.Name, Key: d.Message.Key, Class: d.Class, Error: d.Error, Fingerprint: d.Fingerprint,
		Attempts: d.Attempts, Transport: d.Message.Transport, CreatedAt: told(d.CreatedAt), FailedAt: told(d.FailedAt), ContentType: d.Message.ContentType,
		Exchange: d.Message.Route.Exchange, RoutingKey: d.Message.Route.RoutingKey, Cursor: d.Cursor,
	}
	if d.Unreadable != nil {
		l.Unreadable = d.Unreadable.Error()
	}
	if whole {
		l.Fill(d.Message.Headers, d.Message.Body)
	}
	return l
}

func (o outboxShelf) Count(ctx context.Context, s Selection) (int, error) {
	return o.letters.Count(ctx, outboxFilter(s))
}

func (o outboxShelf) Groups(ctx context.Context, s Selection) ([]Group, error) {
	found, err := o.letters.Groups(ctx, outboxFilter(s))
	return Mapped(found, func(g outbox.Group) Group {
		return Group{o.name, g.Fingerprint, g.Count, told(g.First), told(g.Last), o.letter(g.Sample, false), false}
	}), err
}

func (o outboxShelf) replay(ctx context.Context, s Selection, c Change) (Replayed, error) {
	how := outbox.Replay{By: c.By, Reason: c.Reason, PerSecond: c.PerSecond, DryRun: c.DryRun, Force: c.Force}
	if c.Progress != nil {
		how.Progress = func(r outbox.Replayed) { c.Progress(r.Returned + r.Failed) }
	}
	if c.Edit != nil {
		how.Edit = func(m outbox.Message) ([]byte, error) {
			return c.Edit(operator.MaskedMessage{From: o.name, Name: m.Name, ContentType: m.ContentType, Body: m.Body})
		}
	}
	r, err := o.letters.Replay(ctx, outboxFilter(s), how)
	return Replayed(r), err
}

func (o outboxShelf) remove(ctx context.Context, s Selection, c Change) (int, error) {
	return o.letters.Remove(ctx, outboxFilter(s), outbox.Removal{By: c.By, Reason: c.Reason, Progress: c.Progress})
}

func outboxFilter(s Selection) outbox.Filter {
	return outbox.Filter{
		IDs: s.IDs, Name: s.Name, Key: s.Key, Class: s.Class, Fingerprint: s.Group, ErrorContains: s.ErrorContains,
		FailedAfter: s.After, FailedBefore: s.Before, Limit: s.Limit, After: s.Behind,
	}
}
