package outboxpgx

import (
	"context"
	"fmt"

	"github.com/holdfast-go/holdfast/internal/chunk"
)

const pruneSQL = `
DELETE FROM {outbox} WHERE id = ANY(ARRAY(
  SELECT id FROM {outbox} WHERE published_at IS NOT NULL AND published_at < now() - $1 * interval '1 microsecond'
  ORDER BY published_at LIMIT $2 FOR UPDATE SKIP LOCKED))`

// pruneChunk bounds one transaction of Prune, in rows.
const pruneChunk = 1000

// Prune deletes published messages older than the retention, the keys of Writer.WriteOnce that have
// run out, and what is older than a year of DeadLetters.Audit, in small transactions, and returns how
// many messages. It may be cut short by ctx at any time.
func (s *Source) Prune(ctx context.Context) (n int64, err error) {
	_, err = chunk.Delete(ctx, s.pool, pruneChunk, s.sql.forget)
	if err == nil {
		_, err = chunk.Delete(ctx, s.pool, pruneChunk, s.t.fill(auditPruneSQL), auditRetention.Microseconds())
	}
	if err == nil && s.cfg.Retention > 0 {
		n, err = chunk.Delete(ctx, s.pool, pruneChunk, s.t.fill(pruneSQL), s.cfg.Retention.Microseconds())
	}
	if err != nil {
		return n, fmt.Errorf("outboxpgx: prune: %w", s.t.explain(err))
	}
	return n, nil
}
