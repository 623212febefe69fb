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
	args, err := filterArgs(f)
	if err != nil {
		return nil, err
	}
	return collect(ctx, d, "group dead letters", scanGroup, d.sql.groups, append(args, limit)...)
}

func scanGroup(row pgx.CollectableRow) (g outbox.Group, err error) {
	s := &g.Sample
	var id [16]byte
	var key pgtype.Text
	var created pgtype.Timestamptz
	err = row.Scan(&g.Count, &g.First, &g.Last, &id, &s.Name, &key, &s.Transport, &created, &s.Attempts,
		&s.Class, &s.Error, &s.FailedAt, &s.Fingerprint)
	s.ID, s.Key, s.CreatedAt, g.Fingerprint = id, key.String, created.Time, s.Fingerprint
	return g, err
}
