package deadletter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/outbox"
)

const (
	// stepSize is how many letters change at a time, so that no transaction is long.
	stepSize = 500
	// editedStepSize is how many are edited before they move: their bodies are in memory.
	editedStepSize = 20
	// maxRefused is how many letters a call leaves out because the store refuses them. If there are more, it ends: the table is
	// at fault, or what has been given.
	maxRefused = 100
)

// Store is what a Replay or a Remove needs of dead letters. One is for one call.
type Store interface {
	// List and Show are those of outbox.DeadLetters.
	List(ctx context.Context, f outbox.Filter) ([]outbox.DeadLetter, error)
	Show(ctx context.Context, id uuid.UUID) (outbox.DeadLetter, error)
	// Selected returns the ids of what f selects, the oldest first.
	Selected(ctx context.Context, f outbox.Filter) ([]uuid.UUID, error)
	// Returnable returns the ids of what a replay returns, in stored order, and counts what stays.
	Returnable(ctx context.Context, f outbox.Filter, r outbox.Replay) ([]uuid.UUID, outbox.Replayed, error)
	// Return brings letters back, however old, all of a step or none. The error of one that cannot be returned is
	// sqlstate.Refused. What the outbox holds again stays
	// and counts as failed.
	Return(ctx context.Context, s Step, r outbox.Replay) (outbox.Replayed, error)
	// Delete removes letters, all that f selects or none, and returns how many. Its error is like that of Return.
	Delete(ctx context.Context, f outbox.Filter, r outbox.Removal) (int, error)
}

// Step is a part of a replay.
type Step struct {
	// Filter is that of the replay, with the ids of the step and no limit.
	Filter outbox.Filter
	// Bodies are the new ones of Filter.IDs, in their order. Nil: they stay as they are.
	Bodies [][]byte
	// Before is how many were returned by the steps before.
	Before int
}

// Replay returns dead letters in steps. They are chosen at its beginning.
func Replay(ctx context.Context, s Store, f outbox.Filter, r outbox.Replay) (outbox.Replayed, error) {
	if err := errors.Join(CheckReplay(r), CheckFilter(f)); err != nil {
		return outbox.Replayed{}, err
	}
	ids, total, err := s.Returnable(ctx, f, r)
	if err != nil {
		return outbox.Replayed{}, err
	}
	size := stepSize
	switch {
	case r.Edit != nil:
		size = editedStepSize
	case r.DryRun:
		total.Returned = len(ids)
		return total, Outlived(total.Outlived)
	}
	var refused error
	for page := range slices.Chunk(ids, size) {
		if err := ctx.Err(); err != nil {
			return total, err
		}
		// A step that has begun ends: the outcome of one that is cut off is unknown.
		why, err := step(context.WithoutCancel(ctx), s, narrowed(f, page), r, &total)
		refused = cmp.Or(refused, why)
		if err != nil {
			return total, err
		}
		if r.Progress != nil {
			r.Progress(total)
		}
	}
	return total, errors.Join(refused, Outlived(total.Outlived))
}

// step returns the letters that f selects, and adds to total what became of them. Why is the first reason
// for which one is not edited.
func step(ctx context.Context, s Store, f outbox.Filter, r outbox.Replay, total *outbox.Replayed) (why, err error) {
	one := Step{Filter: f, Before: total.Returned}
	if r.Edit != nil {
		all, err := s.List(ctx, f)
		if err != nil {
			return nil, err
		}
		if why, err = one.edit(ctx, s, all, r.Edit); err != nil {
			return why, err
		}
		total.Failed += len(all) - len(one.Bodies)
	}
	switch {
	case len(one.Filter.IDs) == 0:
		return why, nil
	case r.DryRun:
		total.Returned += len(one.Filter.IDs)
		return why, nil
	}
	refused, err := part(ctx, s, one, r, total)
	return cmp.Or(why, refused), err
}

// part returns letters. Where the store refuses them together, it returns them by halves, so that those at fault do not keep the
// others: they stay and count as failed. Why is the reason of the first one.
func part(ctx context.Context, s Store, one Step, r outbox.Replay, total *outbox.Replayed) (why, err error) {
	one.Before = total.Returned
	moved, err := s.Return(ctx, one, r)
	ids := one.Filter.IDs
	switch {
	case !sqlstate.Refused(err):
		total.Returned, total.Failed = total.Returned+moved.Returned, total.Failed+moved.Failed
		return nil, err
	case total.Failed >= maxRefused:
		return nil, err
	case len(ids) == 1:
		total.Failed++
		return fmt.Errorf("outbox: message %s cannot be returned: %w", ids[0], err), nil
	}
	for _, half := range one.halves() {
		first, err := part(ctx, s, half, r, total)
		why = cmp.Or(why, first)
		if err != nil {
			return why, err
		}
	}
	return why, nil
}

// halves divides a step of several letters.
func (one Step) halves() [2]Step {
	n := len(one.Filter.IDs) / 2
	first, second := one, one
	first.Filter.IDs, second.Filter.IDs = one.Filter.IDs[:n], one.Filter.IDs[n:]
	if one.Bodies != nil {
		first.Bodies, second.Bodies = one.Bodies[:n], one.Bodies[n:]
	}
	return [2]Step{first, second}
}

// edit asks for the bodies of letters, and leaves those out of the step that are not edited.
func (one *Step) edit(ctx context.Context, s Store, all []outbox.DeadLetter, ask func(outbox.Message) ([]byte, error)) (why, err error) {
	one.Filter.IDs, one.Bodies = nil, nil
	for _, letter := range all {
		if letter.Unreadable != nil && len(all) > 1 { // all may be too large together, and not the letter
			switch letter, err = s.Show(ctx, letter.ID); {
			case errors.Is(err, outbox.ErrNotFound):
				continue
			case err != nil:
				return why, err
			}
		}
		body, refusal := []byte(nil), letter.Unreadable
		if refusal == nil {
			body, refusal = ask(letter.Message)
		}
		if refusal != nil {
			why = cmp.Or(why, fmt.Errorf("outbox: message %s cannot be edited: %w", letter.ID, refusal))
			continue
		}
		one.Filter.IDs = append(one.Filter.IDs, letter.ID)
		one.Bodies = append(one.Bodies, append([]byte{}, body...)) // not nil
	}
	return why, nil
}

// Remove deletes dead letters in steps. They are chosen at its beginning.
func Remove(ctx context.Context, s Store, f outbox.Filter, r outbox.Removal) (removed int, err error) {
	if err := errors.Join(CheckActor(r.By, r.Reason), CheckFilter(f)); err != nil {
		return 0, err
	}
	ids, err := s.Selected(ctx, f)
	if err != nil {
		return 0, err
	}
	var refused refusals
	for page := range slices.Chunk(ids, stepSize) {
		if err := ctx.Err(); err != nil {
			return removed, err
		}
		n, err := refused.remove(context.WithoutCancel(ctx), s, narrowed(f, page), r)
		removed += n
		if err != nil {
			return removed, err
		}
		if r.Progress != nil {
			r.Progress(removed)
		}
	}
	return removed, refused.why
}

// refusals are the letters that cannot be removed.
type refusals struct {
	n   int
	why error // of the first one
}

// remove deletes letters, by halves where the store refuses them together.
func (refused *refusals) remove(ctx context.Context, s Store, f outbox.Filter, r outbox.Removal) (removed int, err error) {
	removed, err = s.Delete(ctx, f, r)
	ids := f.IDs
	switch {
	case !sqlstate.Refused(err) || refused.n >= maxRefused:
		return removed, err
	case len(ids) == 1:
		refused.n++
		refused.why = cmp.Or(refused.why, fmt.Errorf("outbox: message %s cannot be removed: %w", ids[0], err))
		return 0, nil
	}
	for _, half := range [][]uuid.UUID{ids[:len(ids)/2], ids[len(ids)/2:]} {
		n, err := refused.remove(ctx, s, narrowed(f, half), r)
		removed += n
		if err != nil {
			return removed, err
		}
	}
	return removed, nil
}

// narrowed is f for some of what it has selected.
func narrowed(f outbox.Filter, ids []uuid.UUID) outbox.Filter {
	f.IDs, f.Limit = ids, 0
	return f
}
