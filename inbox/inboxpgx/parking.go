package inboxpgx

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
)

const (
	// parkingTimeout bounds one call: a body may have 16 MiB.
	parkingTimeout = 20 * time.Second

	// A scan reads so many dead letters at once, and bodies of so many bytes: one letter at least.
	scanPage  = 100
	scanBytes = 4 << 20
)

// parking is a driver.Parking in Postgres. Its statements stand alone: the order of a key's messages
// is the order in which its consumer, one process, stores them.
type parking struct {
	parkedRows
	reserve *pgcall.Reserve // for renewals

	stop, add, heads, count, claim, renew, fail, done string
	depths, newest, page, giveBack, remove            string
}

// What a statement changes of a consumer's rows, and what a look finds if it was ignored.
const (
	ofMessage = `consumer = $1 AND message_id = $2`
	ofOwner   = ofMessage + ` AND replays <= $3 AND claimed_by = $4`
	ofLetter  = ofMessage + ` AND class IS NOT NULL AND failed_at = $3`
)

func newParking(pool *pgxpool.Pool, names tables, consumer string) *parking {
	name := names.parked
	insert := `INSERT INTO ` + name + ` AS p (consumer, key, message_id, replays, class, failed_at, stopped_at, name, envelope, body)
		VALUES ($1, $2, $3, $4, $5, $6, CASE WHEN $5::text IS NOT NULL THEN now() END, $7, $8, $9) ON CONFLICT (consumer, message_id) DO `
	const free = `(p.claimed_until IS NULL OR p.claimed_until <= clock_timestamp())`
	head := func(after string) string {
		return `(SELECT key, class IS NOT NULL AS stopped FROM ` + name + ` WHERE consumer = $1 AND key COLLATE "C" > ` + after +
			` ORDER BY key COLLATE "C", seq LIMIT 1)`
	}
	return &parking{
		parkedRows: parkedRows{pool, consumer, name, names.missing()},
		reserve:    pgcall.NewReserve(pool),
		stop: insert + `UPDATE SET replays = excluded.replays, class = excluded.class, failed_at = excluded.failed_at,
			stopped_at = excluded.stopped_at, envelope = excluded.envelope, claimed_by = NULL, claimed_until = NULL
			WHERE p.class IS NULL AND p.replays <= excluded.replays AND ` + free,
		add: insert + `NOTHING`,
		// One step of the index per key, however many messages each has.
		heads: `WITH RECURSIVE heads AS (` + head("$2") + ` UNION ALL
			SELECT next.* FROM heads CROSS JOIN LATERAL ` + head("heads.key") + ` AS next) SELECT key, stopped FROM heads LIMIT $3`,
		count: `SELECT count(*) FROM (SELECT FROM ` + name + ` WHERE consumer = $1 LIMIT $2) AS counted`,
		claim: `WITH head AS (SELECT seq, class IS NULL AND (p.claimed_by = $3 OR ` + free + `) AS open FROM ` + name + ` AS p WHERE consumer = $1 AND key COLLATE "C" = $2 ORDER BY seq LIMIT 1),
			mine AS (UPDATE ` + name + ` AS p SET claimed_by = $3, claimed_until = clock_timestamp() + $4::interval FROM head
				WHERE p.consumer = $1 AND p.key COLLATE "C" = $2 AND p.seq = head.seq AND p.class IS NULL AND (p.claimed_by = $3 OR ` + free + `)
				RETURNING envelope, body)
			SELECT coalesce(open, false), envelope, body FROM head LEFT JOIN mine ON true`,
		renew: `UPDATE ` + name + ` SET claimed_until = clock_timestamp() + $3::interval
			WHERE consumer = $1 AND message_id = ANY($4::uuid[]) AND claimed_by = $2 RETURNING message_id`,
		fail: `UPDATE ` + name + ` SET class = $5, failed_at = $6, stopped_at = now(), envelope = $7 WHERE replays = $3 AND ` + ofOwner,
		done: `DELETE FROM ` + name + ` WHERE ` + ofOwner,
		depths: `SELECT class, count(*), min(failed_at) FROM ` + name + ` WHERE consumer = $1 AND class IS NOT NULL
			GROUP BY class ORDER BY class COLLATE "C"`,
		newest: `SELECT coalesce(max(seq), 0) FROM ` + name + ` WHERE consumer = $1 AND class COLLATE "C" = $2`,
		page: `SELECT seq, envelope, body FROM (SELECT *, sum(octet_length(body)) OVER (ORDER BY seq) - octet_length(body) AS before
			FROM (SELECT seq, envelope, body FROM ` + name + ` WHERE consumer = $1 AND class COLLATE "C" = $2 AND seq > $3 AND seq <= $4
				ORDER BY seq LIMIT $5) AS found) AS page WHERE before < $6 ORDER BY seq`,
		giveBack: `UPDATE ` + name + ` SET class = NULL, failed_at = NULL, stopped_at = NULL, claimed_by = NULL, claimed_until = NULL,
			replays = $4, envelope = $5, body = $6 WHERE ` + ofLetter,
		remove: `DELETE FROM ` + name + ` WHERE ` + ofLetter,
	}
}

// Stop implements driver.Parking.
func (p *parking) Stop(ctx context.Context, key string, dead inbox.DeadLetter) error {
	dead.FailedAt = dead.FailedAt.Truncate(time.Microsecond) // as Postgres keeps it
	envelope, err := envelopeOf(dead)
	if err != nil {
		return err
	}
	m := &dead.Message
	return p.put(ctx, p.stop, key, m, dead.Class, dead.FailedAt, envelope)
}

// Append implements driver.Parking.
func (p *parking) Append(ctx context.Context, key string, m *inbox.Message) error {
	envelope, err := envelopeOf(inbox.DeadLetter{Message: *m})
	if err != nil {
		return err
	}
	return p.put(ctx, p.add, key, m, nil, nil, envelope)
}

// put stores a message. Where it changes nothing the message must be there.
func (p *parking) put(ctx context.Context, sql, key string, m *inbox.Message, class, failedAt any, envelope []byte) error {
	n, err := p.exec(ctx, sql, key, m.ID, m.Replays, class, failedAt, m.Name, envelope, bodyOf(m))
	if err != nil || n > 0 {
		return err
	}
	there, err := p.finds(ctx, ofMessage, m.ID)
	if err == nil && !there {
		err = p.ignored(m.ID)
	}
	return err
}

// Heads implements driver.Parking.
func (p *parking) Heads(ctx context.Context, after string, most int) (heads []inboxdriver.Head, err error) {
	err = p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		rows, err := conn.Query(ctx, p.heads, p.consumer, after, most)
		if err != nil {
			return err
		}
		heads, err = pgx.CollectRows(rows, pgx.RowToStructByPos[inboxdriver.Head])
		return err
	})
	return heads, err
}

// Depths implements driver.Letters.
func (p *parking) Depths(ctx context.Context) (depths []inboxdriver.Depth, err error) {
	err = p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		rows, err := conn.Query(ctx, p.depths, p.consumer)
		if err != nil {
			return err
		}
		depths, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (d inboxdriver.Depth, err error) {
			return d, row.Scan(&d.Class, &d.Messages, &d.Oldest)
		})
		return err
	})
	return depths, err
}

// Scan implements driver.Letters.
func (p *parking) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (inboxdriver.Fate, error), failed func(inbox.DeadLetter, error),
) error {
	var last int64
	if err := p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, p.newest, p.consumer, class).Scan(&last)
	}); err != nil {
		return err
	}
	for after := int64(math.MinInt64); ; {
		page, upTo, err := p.letters(ctx, class, after, last)
		if err != nil || len(page) == 0 {
			return err
		}
		after = upTo
		for _, dead := range page {
			fate, err := visit(&dead)
			if errors.Is(err, inboxdriver.ErrDone) {
				return nil
			}
			if err := errors.Join(err, ctx.Err()); err != nil {
				return err
			}
			if err := p.end(ctx, dead, fate); err != nil {
				failed(dead, err)
				if !concernsOne(err) {
					return err
				}
			}
		}
	}
}

// concernsOne reports whether a failure concerns one letter alone: the server has answered, and is not unfit for all.
func concernsOne(err error) bool {
	if errors.Is(err, ErrIgnored) {
		return true
	}
	answer, answered := errors.AsType[*pgconn.PgError](err)
	return answered && !sqlstate.Unavailable(err) && !slices.Contains([]string{"25", "42", "57", "58"}, answer.Code[:2])
}

// letters reads the next dead letters of a class, and the number of the last one.
func (p *parking) letters(ctx context.Context, class string, after, last int64) (page []inbox.DeadLetter, upTo int64, err error) {
	err = p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		page = nil // it may be the second try
		rows, err := conn.Query(ctx, p.page, p.consumer, class, after, last, scanPage, scanBytes)
		if err != nil {
			return err
		}
		var envelope, body []byte
		_, err = pgx.ForEachRow(rows, []any{&upTo, &envelope, &body}, func() error {
			dead, err := letterOf(envelope, body)
			page = append(page, dead)
			return err
		})
		return err
	})
	return page, upTo, err
}

// end does to a letter what the fate says, unless somebody else was faster.
func (p *parking) end(ctx context.Context, dead inbox.DeadLetter, fate inboxdriver.Fate) error {
	switch fate {
	case inboxdriver.Drop:
		n, err := p.exec(ctx, p.remove, dead.Message.ID, dead.FailedAt)
		return p.ended(ctx, n, err, ofLetter, dead.Message.ID, dead.FailedAt)
	case inboxdriver.Return:
		m := dead.Message
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = 1, 0, time.Time{}, nil
		m.Replays++
		envelope, err := envelopeOf(inbox.DeadLetter{Message: m})
		if err != nil {
			return err
		}
		n, err := p.exec(ctx, p.giveBack, m.ID, dead.FailedAt, m.Replays, envelope, bodyOf(&m))
		return p.ended(ctx, n, err, ofLetter, m.ID, dead.FailedAt)
	}
	return nil
}

// ended returns an error if a statement changed no row although there is one that it should have changed. Without
// such a row somebody else was faster.
func (p *parking) ended(ctx context.Context, n int64, err error, where string, id uuid.UUID, args ...any) error {
	if err != nil || n > 0 {
		return err
	}
	left, err := p.finds(ctx, where, append([]any{id}, args...)...)
	if err == nil && left {
		err = p.ignored(id)
	}
	return err
}

// envelopeOf is a message, or a dead letter, without its body.
func envelopeOf(dead inbox.DeadLetter) ([]byte, error) {
	m := &dead.Message
	m.Body, m.PublishedAt, m.FirstFailedAt, dead.FirstFailedAt = nil, kept(m.PublishedAt), kept(m.FirstFailedAt), kept(dead.FirstFailedAt)
	m.History = slices.Clone(m.History)
	for i := range m.History {
		m.History[i].At = kept(m.History[i].At)
	}
	text, err := json.Marshal(dead)
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: parking: message %s: %w", dead.Message.ID, err)
	}
	return text, nil
}

// kept is a time as JSON can have it, zero for none: a sender's may be any, such as the year 55840 where
// milliseconds are taken for seconds.
func kept(t time.Time) time.Time {
	if t = t.UTC(); t.Year() < 0 || t.Year() > 9999 {
		return time.Time{}
	}
	return t
}

func letterOf(envelope, body []byte) (dead inbox.DeadLetter, err error) {
	if err := json.Unmarshal(envelope, &dead); err != nil {
		return dead, fmt.Errorf("inboxpgx: parking: %w", err)
	}
	dead.Message.Body = append([]byte(nil), body...) // the client uses its memory again
	return dead, nil
}

// bodyOf is a message's body, which a column has that is never null.
func bodyOf(m *inbox.Message) []byte { return append([]byte{}, m.Body...) }

// parkedRows calls the database for a consumer's rows.
type parkedRows struct {
	pool     *pgxpool.Pool
	consumer string
	table    string
	missing  migrate.Missing
}

// finds reports whether the consumer has a row.
func (p parkedRows) finds(ctx context.Context, where string, args ...any) (found bool, err error) {
	err = p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+p.table+` WHERE `+where+`)`, append([]any{p.consumer}, args...)...).Scan(&found)
	})
	return found, err
}

func (p parkedRows) ignored(id uuid.UUID) error {
	return p.wrap(pgcall.Ignored(p.table, "a change of message "+id.String()))
}

func (p parkedRows) read(ctx context.Context, fn func(context.Context, *pgxpool.Conn) error) error {
	return p.wrap(pgcall.Twice(ctx, p.pool, parkingTimeout, fn))
}

func (p parkedRows) exec(ctx context.Context, sql string, args ...any) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, parkingTimeout)
	defer cancel()
	n, err := pgcall.Exec(ctx, p.pool, sql, append([]any{p.consumer}, args...)...)
	return n, p.wrap(err)
}

func (p parkedRows) wrap(err error) error {
	if err != nil {
		return fmt.Errorf("inboxpgx: parking: %w", p.missing.Explain(err))
	}
	return nil
}
