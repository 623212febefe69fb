package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// deadLetters is the inbox.DeadLetters of a queue.
type deadLetters struct {
	broker    *Broker
	queue     *queue
	retention time.Duration
}

// bury adds a dead letter. The lock is held.
func (q *queue) bury(letter inbox.DeadLetter) {
	letter.Message = *clone(&letter.Message)
	q.dead = append(q.dead, letter)
}

// List implements inbox.DeadLetters.
func (d *deadLetters) List(_ context.Context, f inbox.Filter) ([]inbox.DeadLetter, error) {
	if err := driver.CheckFilter(f); err != nil {
		return nil, err
	}
	d.broker.mu.Lock()
	defer d.broker.mu.Unlock()
	var found []inbox.DeadLetter
	for _, letter := range d.queue.dead {
		if f.Limit > 0 && len(found) == f.Limit {
			break
		}
		if driver.Match(f, letter) {
			letter.Message = *clone(&letter.Message)
			found = append(found, letter)
		}
	}
	return found, nil
}

// Show implements inbox.DeadLetters: of several it returns the latest.
func (d *deadLetters) Show(ctx context.Context, id uuid.UUID) (inbox.DeadLetter, error) {
	found, err := d.List(ctx, inbox.Filter{IDs: []uuid.UUID{id}})
	if err != nil || len(found) == 0 {
		return inbox.DeadLetter{}, errors.Join(err, inbox.ErrNotFound)
	}
	return found[len(found)-1], nil
}

// Replay implements inbox.DeadLetters. What is left stays when ctx ends during the pauses of
// PerSecond.
func (d *deadLetters) Replay(ctx context.Context, f inbox.Filter, how inbox.Replay) (done inbox.Replayed, err error) {
	if err := errors.Join(ctx.Err(), driver.CheckFilter(f), driver.CheckReplay(how)); err != nil {
		return done, err
	}
	now, most := time.Now(), f.Limit
	f.Limit = 0 // those that stay do not count
	letters, err := d.List(ctx, f)
	if err != nil {
		return done, err
	}
	for _, letter := range letters {
		if most > 0 && done.Returned == most {
			break
		}
		if driver.Outlived(how, letter, d.retention, now) {
			done.Outlived++
			continue
		}
		if !how.DryRun {
			if done.Returned > 0 && driver.Pause(how) > 0 {
				if err := runloop.Sleep(ctx, driver.Pause(how)); err != nil {
					return done, err
				}
			}
			if !d.takeBack(letter) {
				continue // somebody else was faster
			}
			letter.Message.Replays++
			d.broker.change(func() { d.queue.put(&letter.Message) })
		}
		done.Returned++
	}
	if done.Outlived > 0 {
		return done, fmt.Errorf("inboxtest: %d messages: %w", done.Outlived, inbox.ErrOutlived)
	}
	return done, nil
}

// takeBack removes one dead letter.
func (d *deadLetters) takeBack(letter inbox.DeadLetter) bool {
	return len(d.takeOut(inbox.Filter{
		IDs: []uuid.UUID{letter.Message.ID}, Class: letter.Class, Name: letter.Message.Name, Limit: 1,
	})) == 1
}

// Count implements inbox.DeadLetters.
func (d *deadLetters) Count(ctx context.Context, f inbox.Filter) (int, error) {
	found, err := d.List(ctx, f)
	return len(found), err
}

// Remove implements inbox.DeadLetters.
func (d *deadLetters) Remove(ctx context.Context, f inbox.Filter, by, reason string) (int, error) {
	if err := errors.Join(ctx.Err(), driver.CheckFilter(f), driver.CheckRemoval(by, reason)); err != nil {
		return 0, err
	}
	return len(d.takeOut(f)), nil
}

func (d *deadLetters) takeOut(f inbox.Filter) []inbox.DeadLetter {
	d.broker.mu.Lock()
	defer d.broker.mu.Unlock()
	var taken []inbox.DeadLetter
	d.queue.dead = slices.DeleteFunc(d.queue.dead, func(letter inbox.DeadLetter) bool {
		if f.Limit > 0 && len(taken) == f.Limit || !driver.Match(f, letter) {
			return false
		}
		taken = append(taken, letter)
		return true
	})
	return taken
}
