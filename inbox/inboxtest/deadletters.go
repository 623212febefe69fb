package inboxtest

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
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
	d.mu.Lock()
	defer d.mu.Unlock()
	var found []inbox.DeadLetter
	for _, letter := range d.letters {
		if f.Limit > 0 && len(found) == f.Limit {
			break
		}
		if f.Match(letter) {
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

// Retry puts the dead letters that the filter selects back into the queue, as if newly
// published, and returns how many.
func (d *DeadLetters) Retry(ctx context.Context, f inbox.Filter) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	letters := d.takeOut(f)
	for _, letter := range letters {
		if err := d.broker.Publish(context.WithoutCancel(ctx), &letter.Message); err != nil {
			return 0, err
		}
	}
	return len(letters), nil
}

// Remove deletes the dead letters that the filter selects and returns how many.
func (d *DeadLetters) Remove(ctx context.Context, f inbox.Filter) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	return len(d.takeOut(f)), nil
}

func (d *DeadLetters) takeOut(f inbox.Filter) []inbox.DeadLetter {
	d.mu.Lock()
	defer d.mu.Unlock()
	var taken []inbox.DeadLetter
	d.letters = slices.DeleteFunc(d.letters, func(letter inbox.DeadLetter) bool {
		if f.Limit > 0 && len(taken) == f.Limit || !f.Match(letter) {
			return false
		}
		taken = append(taken, letter)
		return true
	})
	return taken
}
