package memqueue

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// retrying is a driver.DeadLetters of the messages that wait for a time.
type retrying struct{ source *Source }

// Retrying implements driver.Delayer. The source's script applies to changed ones.
func (s *Source) Retrying() driver.DeadLetters { return &retrying{s} }

// Depths implements driver.DeadLetters.
func (r *retrying) Depths(ctx context.Context) ([]driver.Depth, error) {
	backlog, err := r.source.Backlog(ctx)
	return []driver.Depth{{Class: driver.WaitingPutOff, Messages: backlog.PutOff}, {Class: driver.WaitingRetry, Messages: backlog.Retrying}}, err
}

// Scan implements driver.DeadLetters.
func (r *retrying) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	for _, one := range r.all(class) {
		if err := ctx.Err(); err != nil {
			return err
		}
		found, there := r.show(one, class)
		if !there {
			continue
		}
		outcome, err := visit(&found)
		if errors.Is(err, driver.ErrDone) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := r.end(ctx, one, outcome, found.DueAt); err != nil {
			failed(found, err)
		}
	}
	return nil
}

// all returns the waiting messages of a class, the one due first at the start.
func (r *retrying) all(class string) []*delayed {
	q := r.source.queue
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	all := slices.DeleteFunc(slices.Clone(q.delayed), func(d *delayed) bool { return d.putOff != (class == driver.WaitingPutOff) })
	slices.SortStableFunc(all, func(a, b *delayed) int { return a.due.Compare(b.due) })
	return all
}

func (r *retrying) show(one *delayed, class string) (found inbox.DeadLetter, there bool) {
	q := r.source.queue
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	return driver.NewWaiting(clone(one.msg), class, one.due), slices.Contains(q.delayed, one)
}

// end applies an outcome to a waiting message. It returns ErrGone if the message no longer waits.
func (r *retrying) end(ctx context.Context, one *delayed, outcome driver.Outcome, due time.Time) error {
	if outcome == driver.Keep {
		return nil
	}
	what, err := r.source.at(ctx, Scan, one.msg)
	if what == FailBefore {
		return err
	}
	q := r.source.queue
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	if !q.undelay(one) {
		return driver.ErrGone
	}
	if outcome == driver.Return {
		q.later(one.msg, time.Until(due), one.putOff)
	}
	q.broker.change()
	return err
}
