package outboxpgx

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/internal/deadletter"
)

// Groups implements outbox.DeadLetters.
func (d *deadLetters) Groups(ctx context.Context, f outbox.Filter) ([]outbox.Group, error) {
	limit := cmp.Or(f.Limit, deadletter.GroupsLimit)
	f.Limit = min(f.Limit, 0) // it bounds the groups, not the letters; a negative one is refused
	if err := deadletter.CheckFilter(f); err != nil {
		return nil, err
	}
	return collect(ctx, d, "group dead letters", scanGroup, d.sql.groups, append(filterArgs(f), limit)...)
}

func scanGroup(row pgx.CollectableRow) (g outbox.Group, err error) {
	s := &g.Sample
	var id [16]byte
	var key pgtype.Text
	var first, last, created, failed pgtype.Timestamptz // each may be infinite, which is the zero time
	err = row.Scan(&g.Count, &first, &last, &id, &s.Name, &key, &s.Transport, &created, &s.Attempts,
		&s.Class, &s.Error, &failed, &s.Fingerprint)
	g.First, g.Last, g.Fingerprint = first.Time, last.Time, s.Fingerprint
	s.ID, s.Key, s.CreatedAt, s.FailedAt = id, key.String, created.Time, failed.Time
	return g, err
}
