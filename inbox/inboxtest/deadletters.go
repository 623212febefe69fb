package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// DeadLetters are the messages a Broker has given up, oldest first. It is safe for
// concurrent use.
type DeadLetters struct {
	broker *Broker

	mu      sync.Mutex
	letters []inbox.DeadLetter
}

func (d *DeadLetters) add(letter inbox.DeadLetter) {
	letter.Message = *clone(&letter.Message)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.letters = append(d.letters, letter)
}

// List returns the dead letters that the filter selects.
func (d *DeadLetters) List(_ context.Context, f inbox.Filter) ([]inbox.DeadLetter, error) {
	if err := driver.CheckFilter(f); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var found []inbox.DeadLetter
	for _, letter := range d.letters {
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

// Show returns the latest dead letter with this message id, or inbox.ErrNotFound.
func (d *DeadLetters) Show(ctx context.Context, id uuid.UUID) (inbox.DeadLetter, error) {
	found, err := d.List(ctx, inbox.Filter{IDs: []uuid.UUID{id}})
	if err != nil || len(found) == 0 {
		return inbox.DeadLetter{}, errors.Join(err, inbox.ErrNotFound)
	}
	return found[len(found)-1], nil
}

// Replay puts the dead letters that the filter selects back into the queue, as messages that
// were never tried. Those refused for their age stay, and the error tells of them. The
// others have left when ctx ends during the pauses of PerSecond; what is left stays.
func (d *DeadLetters) Replay(ctx context.Context, f inbox.Filter, how inbox.Replay) (done inbox.Replayed, err error) {
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
		if driver.Outlived(how, letter, driver.DefaultRetention, now) {
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
			if err := d.broker.Publish(context.WithoutCancel(ctx), &letter.Message); err != nil {
				return done, err
			}
		}
		done.Returned++
	}
	if done.Outlived > 0 {
		return done, fmt.Errorf("inboxtest: %d messages: %w", done.Outlived, inbox.ErrOutlived)
	}
	return done, nil
}

// takeBack removes one dead letter.
func (d *DeadLetters) takeBack(letter inbox.DeadLetter) bool {
	return len(d.takeOut(inbox.Filter{
		IDs: []uuid.UUID{letter.Message.ID}, Class: letter.Class, Name: letter.Message.Name, Limit: 1,
	})) == 1
}

// Count implements inbox.DeadLetters.
func (d *DeadLetters) Count(ctx context.Context, f inbox.Filter) (int, error) {
	found, err := d.List(ctx, f)
	return len(found), err
}

// Remove deletes the dead letters that the filter selects and returns how many.
func (d *DeadLetters) Remove(ctx context.Context, f inbox.Filter, by, reason string) (int, error) {
	if err := errors.Join(ctx.Err(), driver.CheckFilter(f), driver.CheckRemoval(by, reason)); err != nil {
		return 0, err
	}
	return len(d.takeOut(f)), nil
}

func (d *DeadLetters) takeOut(f inbox.Filter) []inbox.DeadLetter {
	d.mu.Lock()
	defer d.mu.Unlock()
	var taken []inbox.DeadLetter
	d.letters = slices.DeleteFunc(d.letters, func(letter inbox.DeadLetter) bool {
		if f.Limit > 0 && len(taken) == f.Limit || !driver.Match(f, letter) {
			return false
		}
		taken = append(taken, letter)
		return true
	})
	return taken
}
