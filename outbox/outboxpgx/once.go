package outboxpgx

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// WriteOnce is Write for one message that may be written only once: while a message was written with
// the key within Config.DedupRetention, it writes nothing and returns that message's id and
// false. The key is remembered with the commit of tx, whatever becomes of the message; see
// driver.CheckDedupKey for its form.
//
// Unlike the message, the key is written at once: of two transactions with one key, the second waits
// for the end of the first. At REPEATABLE READ and above it may then fail with 40001, which txretry
// tries again.
func (s *Store) WriteOnce(ctx context.Context, tx pgx.Tx, key string, m outbox.Message) (id uuid.UUID, first bool, err error) {
	if tx == nil {
		return uuid.Nil, false, errors.New("outboxpgx: WriteOnce needs a transaction")
	}
	prepared, err := outbox.Prepare(ctx, []outbox.Message{m}, s.cfg.MaxBodyBytes)
	if refused := driver.CheckDedupKey(key); refused != nil {
		err = errors.Join(&outbox.MessageError{Field: "DedupKey", Problem: refused.Error()}, err)
	}
	if err != nil {
		return uuid.Nil, false, err
	}
	for range 2 { // a key may expire and be pruned between the two statements
		tag, err := tx.Exec(ctx, s.sql.remember, key, prepared[0].ID, s.cfg.DedupRetention.Microseconds())
		if err == nil && tag.RowsAffected() > 0 {
			return prepared[0].ID, true, s.put(ctx, tx, prepared)
		}
		if err == nil { // a statement of its own: what the one before has met may be newer than its snapshot
			err = tx.QueryRow(ctx, s.sql.recall, key).Scan(&id)
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			if err != nil {
				return uuid.Nil, false, fmt.Errorf("outboxpgx: write once: %w", s.t.explain(err))
			}
			return id, false, nil
		}
	}
	return uuid.Nil, false, fmt.Errorf("outboxpgx: write once: %w", pgcall.Ignored(s.t.dedup, fmt.Sprintf("key %q", key)))
}
