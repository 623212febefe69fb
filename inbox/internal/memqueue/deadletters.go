package memqueue

import (
	"bytes"
	"context"
	"errors"
	"slices"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// deadLetter is a dead letter of a queue.
type deadLetter struct {
	inbox.DeadLetter
	place int64 // of the message in its queue
	gone  bool
}

// deadLetters is a driver.DeadLetters.
type deadLetters struct{ source *Source }

// DeadLetters returns the dead letters of the queue. The source's script applies to returned ones.
func (s *Source) DeadLetters() driver.DeadLetters { return &deadLetters{s} }

// Depths implements driver.DeadLetters.
func (l *deadLetters) Depths(ctx context.Context) ([]driver.Depth, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	q := l.source.queue
	q.broker.mu.Lock()
	classes := slices.Clone(q.classes)
	q.broker.mu.Unlock()
	depths := make([]driver.Depth, len(classes))
	for i, class := range classes {
		all := l.all(class)
		depths[i] = driver.Depth{Class: class, Messages: len(all)}
		if len(all) > 0 {
			depths[i].Oldest = all[0].FailedAt
		}
	}
	return depths, nil
}

// Scan implements driver.DeadLetters.
func (l *deadLetters) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	for _, one := range l.all(class) {
		if err := ctx.Err(); err != nil {
			return err
		}
		dead, there := l.show(one)
		if !there {
			continue // another call was faster
		}
		outcome, err := visit(&dead)
		if errors.Is(err, driver.ErrDone) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := l.end(ctx, one, outcome, dead.Message.Body); err != nil {
			failed(dead, err)
		}
	}
	return nil
}

func (l *deadLetters) all(class string) []*deadLetter {
	q := l.source.queue
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	q.dead[class] = slices.DeleteFunc(q.dead[class], func(one *deadLetter) bool { return one.gone })
	return slices.Clone(q.dead[class])
}

func (l *deadLetters) show(one *deadLetter) (dead inbox.DeadLetter, there bool) {
	l.source.queue.broker.mu.Lock()
	defer l.source.queue.broker.mu.Unlock()
	dead = one.DeadLetter
	dead.Message = *clone(&one.Message)
	return dead, !one.gone
}

// end applies an outcome to a dead letter, unless another call was faster. Body is the body of a returned
// message.
func (l *deadLetters) end(ctx context.Context, one *deadLetter, outcome driver.Outcome, body []byte) error {
	if outcome == driver.Keep {
		return nil
	}
	what, err := l.source.at(ctx, Scan, &one.Message)
	if what == FailBefore {
		return err
	}
	q := l.source.queue
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	if one.gone {
		return driver.ErrGone
	}
	if outcome == driver.Return {
		if q.missing {
			return driver.ErrMissing
		}
		m := q.fresh(&one.Message)
		m.Replays++
		m.Body = bytes.Clone(body)
		q.append(m)
	}
	one.gone = true
	q.broker.change()
	return err
}
