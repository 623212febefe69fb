package outboxpgx

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/internal/deadletter"
)

// editedAtOnce is how many letters are edited before they move: their bodies are in memory.
const editedAtOnce = 20

// replayEdited is Replay where bodies are replaced. The letters are chosen at its beginning.
func (d *deadLetters) replayEdited(ctx context.Context, f outbox.Filter, r outbox.Replay) (total outbox.Replayed, err error) {
	total, err = d.tryReplay(ctx, f, r)
	if err != nil && !errors.Is(err, outbox.ErrOutlived) {
		return outbox.Replayed{}, err
	}
	ids, err := d.chosen(ctx, f, r)
	if err != nil {
		return outbox.Replayed{}, err
	}
	total.Returned = 0
	done := &steps{chosenBy: f}
	var refused error
	for page := range slices.Chunk(ids, editedAtOnce) {
		edited, why, err := d.edit(ctx, page, r.Edit)
		if err != nil {
			return total, err
		}
		refused = firstOf(refused, why)
		total.Failed += len(page) - len(edited.ids)
		moved, err := d.replayPage(ctx, edited, done, r)
		total.Returned, total.Failed = total.Returned+moved.Returned, total.Failed+moved.Failed
		if err != nil {
			return total, err
		}
	}
	return total, errors.Join(refused, deadletter.Outlived(total.Outlived))
}

// chosen are the ids of what a replay would return, the oldest letter first.
func (d *deadLetters) chosen(ctx context.Context, f outbox.Filter, r outbox.Replay) ([]uuid.UUID, error) {
	args, err := filterArgs(f)
	if err != nil {
		return nil, err
	}
	scan := func(row pgx.CollectableRow) (id uuid.UUID, err error) {
		var raw pgtype.UUID
		err = row.Scan(&raw)
		return raw.Bytes, err
	}
	return collect(ctx, d, "edit dead letters", scan, d.sql.chosen, append(args, deadletter.Retention.Microseconds(), r.Force)...)
}

// bodies are those of edited letters.
type bodies struct {
	ids  []uuid.UUID
	raw  uuids
	each [][]byte
}

// edit asks for the bodies of letters. Why is the first reason for which one is left out.
func (d *deadLetters) edit(ctx context.Context, page []uuid.UUID, ask func(outbox.Message) ([]byte, error)) (all bodies, why, err error) {
	letters, err := d.List(ctx, outbox.Filter{IDs: page})
	if err != nil {
		return all, nil, err
	}
	for _, letter := range letters {
		if letter.Unreadable != nil && len(letters) > 1 { // the page may be too large, and not the letter
			switch letter, err = d.Show(ctx, letter.ID); {
			case errors.Is(err, outbox.ErrNotFound):
				continue
			case err != nil:
				return all, why, err
			}
		}
		body, refusal := []byte(nil), letter.Unreadable
		if refusal == nil {
			body, refusal = ask(letter.Message)
		}
		if refusal != nil {
			why = firstOf(why, fmt.Errorf("outbox: message %s cannot be edited: %w", letter.ID, refusal))
			continue
		}
		all.ids = append(all.ids, letter.ID)
		all.raw = append(all.raw, pgtype.UUID{Bytes: letter.ID, Valid: true})
		all.each = append(all.each, append([]byte{}, body...)) // null would leave it as it is
	}
	return all, why, nil
}

// replayPage moves letters whose bodies are edited, as one step of a replay.
func (d *deadLetters) replayPage(ctx context.Context, edited bodies, done *steps, r outbox.Replay) (outbox.Replayed, error) {
	if len(edited.ids) == 0 {
		return outbox.Replayed{}, nil
	}
	f := outbox.Filter{IDs: edited.ids}
	r.Force = true // those that are too old were not chosen
	if r.DryRun {
		return d.tryReplay(ctx, f, r)
	}
	return d.move(ctx, f, r, done, edited)
}

// firstOf is the first error that is one.
func firstOf(a, b error) error {
	if a != nil {
		return a
	}
	return b
}
