package outboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/internal/deadletter"
)

// Replay implements outbox.DeadLetters. All letters move or none, but for those whose id the outbox
// holds again and those that are too old: they stay. With an Edit that is so for 20 at a time.
func (d *deadLetters) Replay(ctx context.Context, f outbox.Filter, r outbox.Replay) (outbox.Replayed, error) {
	if err := deadletter.CheckReplay(r); err != nil {
		return outbox.Replayed{}, err
	}
	if r.Edit != nil {
		return d.replayEdited(ctx, f, r)
	}
	if r.DryRun {
		return d.tryReplay(ctx, f, r)
	}
	return d.move(ctx, f, r, &steps{chosenBy: f}, bodies{})
}

// steps are those of a replay that has several, as far as they are.
type steps struct {
	chosenBy outbox.Filter // of the whole replay
	returned int
	note     int // of the audit; 0: none yet
}

// move brings letters back, edited or not, behind those that the steps before have brought.
func (d *deadLetters) move(ctx context.Context, f outbox.Filter, r outbox.Replay, s *steps, edited bodies) (outbox.Replayed, error) {
	var between int64 // microseconds
	if r.PerSecond > 0 {
		between = int64(min(float64(time.Second/time.Microsecond)/r.PerSecond, float64(365*24*time.Hour/time.Microsecond)))
	}
	var replayed outbox.Replayed
	note := audited{actionReplay, r.By, r.Reason, s.chosenBy}
	err := d.change(ctx, note, d.sql.replay, f, []any{deadletter.Retention.Microseconds(), r.Force, between, s.returned, edited.raw, edited.each, s.note},
		&replayed.Returned, &replayed.Outlived, &replayed.Failed, &s.note)
	if err != nil {
		return outbox.Replayed{}, err
	}
	s.returned += replayed.Returned
	return replayed, deadletter.Outlived(replayed.Outlived)
}

// tryReplay counts what Replay would do.
func (d *deadLetters) tryReplay(ctx context.Context, f outbox.Filter, r outbox.Replay) (replayed outbox.Replayed, err error) {
	args, err := filterArgs(f)
	if err != nil {
		return replayed, err
	}
	args = append(args, deadletter.Retention.Microseconds(), r.Force)
	err = pgcall.Twice(ctx, d.pool, d.readTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, d.sql.trial, args...).Scan(&replayed.Returned, &replayed.Outlived, &replayed.Failed)
	})
	if err != nil {
		return outbox.Replayed{}, fmt.Errorf("outboxpgx: replay dead letters: %w", d.t.explain(err))
	}
	return replayed, deadletter.Outlived(replayed.Outlived)
}

// Remove implements outbox.DeadLetters.
func (d *deadLetters) Remove(ctx context.Context, f outbox.Filter, by, reason string) (n int, err error) {
	if err := deadletter.CheckActor(by, reason); err != nil {
		return 0, err
	}
	err = d.change(ctx, audited{actionRemove, by, reason, f}, d.sql.remove, f, nil, &n)
	return n, err
}

// audited is what the audit keeps of a change, beside its count.
type audited struct {
	action, by, reason string
	chosenBy           outbox.Filter
}

// change runs a statement that changes dead letters and notes who did so, in one round trip, so that
// no lock outlives a connection that falls silent. It scans the statement's one row into counts, which
// stay as they are on an error.
func (d *deadLetters) change(ctx context.Context, note audited, sql string, f outbox.Filter, more []any, counts ...*int) error {
	args, err := filterArgs(f)
	if err != nil {
		return err
	}
	chosenBy, err := encodeFilter(note.chosenBy)
	if err != nil {
		return err
	}
	args = append(append(args, more...), note.by, note.reason, chosenBy)
	got, dest := make([]int, len(counts)), make([]any, len(counts))
	for i := range got {
		dest[i] = &got[i]
	}
	err = pgcall.Within(ctx, d.pool, d.changeTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		queue := &pgx.Batch{}
		queue.Queue(beginSQL)
		queue.Queue(sql, args...).QueryRow(func(row pgx.Row) error { return row.Scan(dest...) })
		queue.Queue(commitSQL)
		return conn.SendBatch(ctx, queue).Close()
	})
	if err != nil {
		return fmt.Errorf("outboxpgx: %s dead letters: %w", note.action, d.t.explain(err))
	}
	for i, count := range counts {
		*count = got[i]
	}
	return nil
}
