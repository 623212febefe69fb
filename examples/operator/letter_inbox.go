package operator

import (
	"context"
	"errors"

	"github.com/holdfast-go/holdfast/inbox"
)

// inboxShelf has the messages that a consumer has given up.
type inboxShelf struct {
	name    string
	letters inbox.DeadLetters
}

func (i inboxShelf) keepsLog() bool { return false }

func (i inboxShelf) list(ctx context.Context, s selection, whole bool) ([]letter, error) {
	if s.Behind != "" {
		return nil, errors.New("the letters of a consumer have no order to go on in")
	}
	filter := inboxFilter(s)
	filter.Whole = whole
	found, err := i.letters.List(ctx, filter)
	part, err := inPart(err)
	return mapped(found, func(d inbox.DeadLetter) letter {
		l := i.letter(d, whole)
		l.Part = part
		return l
	}), err
}

// errPart is said where RabbitMQ has handed some of a consumer's dead letters to another session.
var errPart = errors.New("a part only: another session holds the rest")

// inPart reports whether a look saw a part, and says that in fewer words.
func inPart(err error) (part bool, said error) {
	if errors.Is(err, inbox.ErrHeld) {
		return true, errPart
	}
	return false, err
}

func (i inboxShelf) letter(d inbox.DeadLetter, whole bool) letter {
	m := d.Message
	l := letter{
		From: i.name, ID: m.ID, Name: m.Name, Key: m.Key, Class: d.Class, Error: d.Error, ErrorType: d.ErrorType, SQLState: d.SQLState,
		Fingerprint: d.Fingerprint, Attempts: d.Attempts, Replays: m.Replays, Queue: m.Queue, Consumer: d.Consumer,
		CreatedAt: told(m.PublishedAt), FirstFailed: told(d.FirstFailedAt), FailedAt: told(d.FailedAt), ContentType: m.ContentType,
	}
	for _, a := range m.History {
		l.History = append(l.History, failure{told(a.At), a.Consumer, a.Error})
	}
	switch {
	case whole && d.Omitted:
		l.Unreadable = "left out: the letters before it are too large together"
	case whole:
		l.fill(m.Headers, m.Body)
	}
	return l
}

func (i inboxShelf) count(ctx context.Context, s selection) (int, error) {
	n, err := i.letters.Count(ctx, inboxFilter(s))
	_, err = inPart(err)
	return n, err
}

func (i inboxShelf) groups(ctx context.Context, s selection) ([]group, error) {
	found, err := i.letters.Groups(ctx, inboxFilter(s))
	part, err := inPart(err)
	return mapped(found, func(g inbox.Group) group {
		return group{i.name, g.Fingerprint, g.Count, told(g.First), told(g.Last), i.letter(g.Sample, false), part}
	}), err
}

func (i inboxShelf) replay(ctx context.Context, s selection, c change) (replayed, error) {
	how := inbox.Replay{By: c.By, Reason: c.Reason, PerSecond: c.PerSecond, DryRun: c.DryRun, Force: c.Force}
	if c.Progress != nil {
		how.Progress = func(r inbox.Replayed) { c.Progress(r.Returned + r.Failed) }
	}
	if c.Edit != nil {
		how.Edit = func(m inbox.Message) ([]byte, error) {
			return c.Edit(MaskedMessage{i.name, m.Name, m.ContentType, m.Body})
		}
	}
	r, err := i.letters.Replay(ctx, inboxFilter(s), how)
	return replayed(r), err
}

func (i inboxShelf) remove(ctx context.Context, s selection, c change) (int, error) {
	return i.letters.Remove(ctx, inboxFilter(s), inbox.Removal{By: c.By, Reason: c.Reason, Progress: c.Progress})
}

func inboxFilter(s selection) inbox.Filter {
	return inbox.Filter{
		IDs: s.IDs, Name: s.Name, Key: s.Key, Class: s.Class, Fingerprint: s.Group, ErrorContains: s.ErrorContains,
		FailedAfter: s.After, FailedBefore: s.Before, Limit: s.Limit,
	}
}
