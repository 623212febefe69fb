package core

import (
	"context"
	"errors"
	"fmt"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/modules/operator"
)

// inboxShelf has the messages that a consumer has given up.
type inboxShelf struct {
	name    string
	letters inbox.DeadLetters
}

func (i inboxShelf) keepsLog() bool { return false }

func (i inboxShelf) List(ctx context.Context, s Selection, whole bool) ([]Letter, error) {
	if s.Behind != "" {
		return nil, errors.New("the letters of a consumer have no order to go on in")
	}
	filter := inboxFilter(s)
	filter.Whole = whole
	found, err := i.letters.List(ctx, filter)
	part, err := inPart(err)
	return Mapped(found, func(d inbox.DeadLetter) Letter {
		l := i.letter(d, whole)
		l.Part = part
		return l
	}), err
}

// ErrPart is said where RabbitMQ has handed some of a consumer's dead letters to another session.
var ErrPart = errors.New("a part only: another session holds the rest")

// inPart reports whether a look saw a part, and says that in fewer words.
func inPart(err error) (part bool, said error) {
	if errors.Is(err, inbox.ErrHeld) {
		return true, ErrPart
	}
	return false, err
}

func (i inboxShelf) letter(d inbox.DeadLetter, whole bool) Letter {
	m := d.Message
	l := Letter{
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
		l.Fill(m.Headers, m.Body)
	}
	return l
}

func (i inboxShelf) Count(ctx context.Context, s Selection) (int, error) {
	n, err := i.letters.Count(ctx, inboxFilter(s))
	_, err = inPart(err)
	return n, err
}

func (i inboxShelf) Groups(ctx context.Context, s Selection) ([]Group, error) {
	found, err := i.letters.Groups(ctx, inboxFilter(s))
	part, err := inPart(err)
	return Mapped(found, func(g inbox.Group) Group {
		return Group{i.name, g.Fingerprint, g.Count, told(g.First), told(g.Last), i.letter(g.Sample, false), part}
	}), err
}

func (i inboxShelf) replay(ctx context.Context, s Selection, c Change) (Replayed, error) {
	how := inbox.Replay{By: c.By, Reason: c.Reason, PerSecond: c.PerSecond, DryRun: c.DryRun, Force: c.Force}
	if c.Progress != nil {
		how.Progress = func(r inbox.Replayed) { c.Progress(r.Returned + r.Failed) }
	}
	if c.Edit != nil {
		how.Edit = func(m inbox.Message) ([]byte, error) {
			return c.Edit(operator.MaskedMessage{From: i.name, Name: m.Name, ContentType: m.ContentType, Body: m.Body})
		}
	}
	r, err := i.letters.Replay(ctx, inboxFilter(s), how)
	return Replayed(r), err
}

func (i inboxShelf) remove(ctx context.Context, s Selection, c Change) (int, error) {
	return i.letters.Remove(ctx, inboxFilter(s), inbox.Removal{By: c.By, Reason: c.Reason, Progress: c.Progress})
}

func inboxFilter(s Selection) inbox.Filter {
	return inbox.Filter{
		IDs: s.IDs, Name: s.Name, Key: s.Key, Class: s.Class, Fingerprint: s.Group, ErrorContains: s.ErrorContains,
		FailedAfter: s.After, FailedBefore: s.Before, Limit: s.Limit,
	}
}

// turn is held by who looks at the dead letters of a consumer.
type turn chan struct{}

// inTurns has those who look at dead letters wait for each other. RabbitMQ hands out each letter once: of two who look
// at the same time each would see a part, and count too few.
type inTurns struct {
	inbox.DeadLetters
	turn turn
}

func (l inTurns) List(ctx context.Context, f inbox.Filter) ([]inbox.DeadLetter, error) {
	return inTurn(ctx, l.turn, func() ([]inbox.DeadLetter, error) { return l.DeadLetters.List(ctx, f) })
}

func (l inTurns) Count(ctx context.Context, f inbox.Filter) (int, error) {
	return inTurn(ctx, l.turn, func() (int, error) { return l.DeadLetters.Count(ctx, f) })
}

func (l inTurns) Groups(ctx context.Context, f inbox.Filter) ([]inbox.Group, error) {
	return inTurn(ctx, l.turn, func() ([]inbox.Group, error) { return l.DeadLetters.Groups(ctx, f) })
}

// Replay waits where it is a look. Others may be paced, and take hours.
func (l inTurns) Replay(ctx context.Context, f inbox.Filter, how inbox.Replay) (inbox.Replayed, error) {
	if !how.DryRun {
		return l.DeadLetters.Replay(ctx, f, how)
	}
	return inTurn(ctx, l.turn, func() (inbox.Replayed, error) { return l.DeadLetters.Replay(ctx, f, how) })
}

func inTurn[T any](ctx context.Context, t turn, look func() (T, error)) (T, error) {
	select {
	case t <- struct{}{}:
		defer func() { <-t }()
		return look()
	case <-ctx.Done():
		var none T
		return none, fmt.Errorf("others look at these dead letters: %w", ctx.Err())
	}
}
