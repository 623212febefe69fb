package deadletter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
)

const (
	// stepSize is how many dead letters change in one transaction, to keep transactions short.
	stepSize = 500
	// editedStepSize is how many are edited at a time, because their bodies are in memory.
	editedStepSize = 20
	// maxRefused is how many dead letters of a call the store may reject. If there are more, the call ends, because the
	// table or the arguments are probably at fault.
	maxRefused = 100
)

// Store is the store of dead letters that a Replay or a Remove in steps works on. Each call has its own Store.
type Store[M any] interface {
	// List and Show are the methods of DeadLetters.
	List(ctx context.Context, f Filter) ([]DeadLetter[M], error)
	Show(ctx context.Context, id uuid.UUID) (DeadLetter[M], error)
	// ID returns the id of a message.
	ID(m M) uuid.UUID
	// Selected returns the ids of the dead letters that f selects, the oldest first.
	Selected(ctx context.Context, f Filter) ([]uuid.UUID, error)
	// Returnable returns the ids of the dead letters that a replay returns, in stored order, and counts those that stay.
	Returnable(ctx context.Context, f Filter, r Replay[M]) ([]uuid.UUID, Replayed, error)
	// Preview counts what a replay would return, and what would stay.
	Preview(ctx context.Context, f Filter, r Replay[M]) (Replayed, error)
	// Return returns the dead letters of a step, however old, all or none. Its error is sqlstate.Refused if one of them
	// cannot be returned. A dead letter whose id the outbox already holds again stays and counts as failed.
	Return(ctx context.Context, s Step, r Replay[M]) (Replayed, error)
	// Delete removes all dead letters that f selects, or none, and returns how many. Its errors are like the errors of
	// Return.
	Delete(ctx context.Context, f Filter) (int, error)
}

// Step is a part of a replay.
type Step struct {
	// Filter is the filter of the replay, with the ids of the step and no limit.
	Filter Filter
	// Bodies are the new bodies for Filter.IDs, in their order. Nil: the bodies stay as they are.
	Bodies [][]byte
	// Before counts the dead letters that earlier steps returned.
	Before int
}

// steps is one Replay or Remove in steps.
type steps[M any] struct {
	store   Store[M]
	replay  Replay[M]
	done    Replayed // a Remove counts the removed ones in Returned
	refused error    // the first reason for which a dead letter stays
}

// InSteps returns dead letters, or moves waiting messages, in steps. It selects them all at the start. The caller has
// checked r.
func InSteps[M any](ctx context.Context, s Store[M], f Filter, r Replay[M]) (Replayed, error) {
	if err := f.Check(); err != nil {
		return Replayed{}, err
	}
	if r.DryRun && r.Edit == nil {
		done, err := s.Preview(ctx, f, r)
		return done, cmp.Or(err, Outlived(done.Outlived))
	}
	ids, stay, err := s.Returnable(ctx, f, r)
	if err != nil {
		return Replayed{}, err
	}
	c := &steps[M]{store: s, replay: r, done: stay}
	size := stepSize
	if r.Edit != nil {
		size = editedStepSize
	}
	err = each(ctx, ids, size, func(ctx context.Context, ids []uuid.UUID) error {
		err := c.step(ctx, narrowed(f, ids))
		if err == nil && r.Progress != nil {
			r.Progress(c.done)
		}
		return err
	})
	if err != nil {
		return c.done, err
	}
	return c.done, errors.Join(c.refused, Outlived(stay.Outlived))
}

// RemoveInSteps deletes dead letters in steps. It selects them all at the start.
func RemoveInSteps[M any](ctx context.Context, s Store[M], f Filter, r Removal) (removed int, err error) {
	if err := errors.Join(r.Check(), f.Check()); err != nil {
		return 0, err
	}
	ids, err := s.Selected(ctx, f)
	if err != nil {
		return 0, err
	}
	c := &steps[M]{store: s}
	err = each(ctx, ids, stepSize, func(ctx context.Context, ids []uuid.UUID) error {
		err := c.byHalves(Step{Filter: narrowed(f, ids)}, "removed", func(one Step) (n Replayed, err error) {
			n.Returned, err = s.Delete(ctx, one.Filter)
			return n, err
		})
		if err == nil && r.Progress != nil {
			r.Progress(c.done.Returned)
		}
		return err
	})
	return c.done.Returned, cmp.Or(err, c.refused)
}

// each calls do for the ids of each step. A started step finishes even if ctx ends, because the outcome of an interrupted
// step would be unknown.
func each(ctx context.Context, ids []uuid.UUID, size int, do func(context.Context, []uuid.UUID) error) error {
	for page := range slices.Chunk(ids, size) {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := do(context.WithoutCancel(ctx), page); err != nil {
			return err
		}
	}
	return nil
}

// step returns the dead letters that f selects.
func (c *steps[M]) step(ctx context.Context, f Filter) error {
	one := Step{Filter: f}
	if c.replay.Edit != nil {
		if err := c.edit(ctx, &one); err != nil {
			return err
		}
	}
	switch {
	case len(one.Filter.IDs) == 0:
		return nil
	case c.replay.DryRun:
		c.done.Returned += len(one.Filter.IDs)
		return nil
	}
	return c.byHalves(one, "returned", func(one Step) (Replayed, error) { return c.store.Return(ctx, one, c.replay) })
}

// byHalves changes dead letters. If the store rejects them together, it changes them by halves, so that those at fault do
// not stop the others. Those at fault stay and count as failed.
func (c *steps[M]) byHalves(one Step, what string, change func(Step) (Replayed, error)) error {
	one.Before = c.done.Returned
	changed, err := change(one)
	ids := one.Filter.IDs
	switch {
	case !sqlstate.Refused(err):
		c.done.Returned, c.done.Failed = c.done.Returned+changed.Returned, c.done.Failed+changed.Failed
		return err
	case c.done.Failed >= maxRefused:
		return err
	case len(ids) == 1:
		c.done.Failed++
		c.refuse(ids[0], what, err)
		return nil
	}
	for _, half := range one.halves() {
		if err := c.byHalves(half, what, change); err != nil {
			return err
		}
	}
	return nil
}

func (c *steps[M]) refuse(id uuid.UUID, what string, err error) {
	c.refused = cmp.Or(c.refused, fmt.Errorf("message %s cannot be %s: %w", id, what, err))
}

// halves divides a step of several dead letters.
func (one Step) halves() [2]Step {
	n := len(one.Filter.IDs) / 2
	first, second := one, one
	first.Filter.IDs, second.Filter.IDs = one.Filter.IDs[:n], one.Filter.IDs[n:]
	if one.Bodies != nil {
		first.Bodies, second.Bodies = one.Bodies[:n], one.Bodies[n:]
	}
	return [2]Step{first, second}
}

// edit calls Replay.Edit for the dead letters of a step, and leaves out the ones that it does not edit.
func (c *steps[M]) edit(ctx context.Context, one *Step) error {
	whole := one.Filter
	whole.Whole = true
	all, err := c.store.List(ctx, whole)
	if err != nil {
		return err
	}
	one.Filter.IDs, one.Bodies = nil, nil
	for _, dead := range all {
		id := c.store.ID(dead.Message)
		if dead.Unreadable != nil && len(all) > 1 { // all may be too large together
			switch dead, err = c.store.Show(ctx, id); {
			case errors.Is(err, ErrNotFound):
				c.done.Failed++
				continue
			case err != nil:
				return err
			}
		}
		body, refusal := []byte(nil), dead.Unreadable
		if refusal == nil {
			body, refusal = c.replay.Edit(dead.Message)
		}
		if refusal != nil {
			c.done.Failed++
			c.refuse(id, "edited", refusal)
			continue
		}
		one.Filter.IDs = append(one.Filter.IDs, id)
		one.Bodies = append(one.Bodies, append([]byte{}, body...)) // not nil
	}
	return nil
}

// narrowed returns f limited to some of the dead letters that it selected.
func narrowed(f Filter, ids []uuid.UUID) Filter {
	f.IDs, f.Limit = ids, 0
	return f
}
