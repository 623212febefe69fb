package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// Claim implements driver.Parking. Two that claim a message at once wait for each other at its row: one of them
// finds it open and does not get it, and looks again.
func (p *parking) Claim(ctx context.Context, key string, l inboxdriver.Lease) (m *inbox.Message, there bool, err error) {
	for range 2 {
		var open bool
		var envelope, body []byte
		err = p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
			return conn.QueryRow(ctx, p.claim, p.consumer, key, uuidOf(l.Owner), l.For).Scan(&open, &envelope, &body)
		})
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return nil, false, nil
		case err != nil:
			return nil, false, err
		case envelope != nil:
			return claimed(envelope, body)
		case !open:
			return nil, true, nil
		}
	}
	return nil, true, p.wrap(pgcall.Ignored(p.table, fmt.Sprintf("the claim of ordering key %q", key)))
}

func claimed(envelope, body []byte) (m *inbox.Message, there bool, err error) {
	dead, err := letterOf(envelope, body)
	if err != nil {
		return nil, true, err
	}
	return &dead.Message, true, nil
}

// renewTimeout bounds one try of a renewal. An engine gives both tries 10 s.
const renewTimeout = 4 * time.Second

// Renew implements driver.Parking. It does not wait for the pool, whose connections the handlers may hold.
func (p *parking) Renew(ctx context.Context, l inboxdriver.Lease, messages []uuid.UUID) (kept []uuid.UUID, err error) {
	ids := make(uuids, len(messages))
	for i, id := range messages {
		ids[i] = uuidOf(id)
	}
	err = p.reserve.Twice(ctx, renewTimeout, func(ctx context.Context, conn *pgx.Conn) error {
		kept = nil // it may be the second try
		rows, err := conn.Query(ctx, p.renew, p.consumer, uuidOf(l.Owner), l.For, ids)
		if err != nil {
			return err
		}
		var id pgtype.UUID
		_, err = pgx.ForEachRow(rows, []any{&id}, func() error {
			kept = append(kept, id.Bytes)
			return nil
		})
		return err
	})
	return kept, p.wrap(err)
}

// Fail implements driver.Parking.
func (p *parking) Fail(ctx context.Context, owner uuid.UUID, dead inbox.DeadLetter) error {
	dead.FailedAt = dead.FailedAt.Truncate(time.Microsecond) // as Postgres keeps it
	envelope, err := envelopeOf(dead)
	if err != nil {
		return err
	}
	m := &dead.Message
	n, err := p.exec(ctx, p.fail, m.ID, m.Replays, uuidOf(owner), dead.Class, dead.FailedAt, envelope)
	if err := p.ended(ctx, n, err, `replays = $3 AND `+ofOwner, m.ID, m.Replays, uuidOf(owner)); err != nil || n > 0 {
		return err
	}
	return p.wrap(inboxdriver.ErrStale)
}

// Done implements driver.Parking.
func (p *parking) Done(ctx context.Context, owner uuid.UUID, m *inbox.Message) error {
	n, err := p.exec(ctx, p.done, m.ID, m.Replays, uuidOf(owner))
	return p.ended(ctx, n, err, ofOwner, m.ID, m.Replays, uuidOf(owner))
}

// Count implements driver.Parking.
func (p *parking) Count(ctx context.Context, most int) (n int, err error) {
	err = p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, p.count, p.consumer, most).Scan(&n)
	})
	return n, err
}
