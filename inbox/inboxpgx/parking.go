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
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

const (
	// parkingTimeout bounds one call: a body may have 16 MiB.
	parkingTimeout = 20 * time.Second

	// A scan reads so many dead letters at once, and bodies of so many bytes: one letter at least.
	scanPage  = 100
	scanBytes = 4 << 20
)

// parking is the driver.Parking in Postgres. Its statements run at READ COMMITTED, each in a transaction of its own,
// but for that of Take. They lock the row of the key before those of its messages.
//
//   - An arrival, Wait, locks the key's row FOR KEY SHARE. It waits for nothing but the end of the key.
//   - A run, Take, holds FOR NO KEY UPDATE until its transaction ends. Others skip the row.
//   - The end, Release, deletes the row, and waits for arrivals. The foreign key refuses the deletion if one of them has
//     stored a message.
type parking struct {
	parkedRows
	stop, wait, there, claim, next, take, pass, retry, fail, free, release, count string
	depths, newest, page, giveBack, remove                                        string
	mine                                                                          string // a head that no other process runs
}

// What a statement changes of a consumer's rows, and what a look finds if it was ignored.
const (
	ofMessage = `consumer = $1 AND message_id = $2`
	ofHead    = ofMessage + ` AND replays = $3 AND attempt = $4 AND class IS NULL`
	ofLetter  = ofMessage + ` AND class IS NOT NULL AND failed_at = $3`
)

func newParking(pool *pgxpool.Pool, names tables, consumer string) *parking {
	stopped, waiting := names.stopped, names.waiting
	insert := `INSERT INTO ` + waiting + ` (consumer, key, message_id, replays, attempt, name, envelope, body, class, failed_at, stopped_at) `
	recorded := `EXISTS (SELECT FROM ` + names.entries + ` WHERE ` + ofMessage + `)`
	// mine locks the row of a key unless a run has it.
	mine := func(which string) string {
		return `WITH mine AS (SELECT key FROM ` + stopped + ` WHERE consumer = $1 AND ` + which + ` LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) `
	}
	claim := func(which string) string {
		return mine(which) + `, head AS (SELECT * FROM ` + waiting + ` WHERE consumer = $1 AND key = (SELECT key FROM mine) ORDER BY seq LIMIT 1),
			counted AS (UPDATE ` + waiting + ` AS w SET runs = w.runs + 1 FROM head
				WHERE w.consumer = $1 AND w.message_id = head.message_id AND w.class IS NULL RETURNING w.message_id),
			turn AS (UPDATE ` + stopped + ` AS s SET next_at = clock_timestamp() + $2::interval FROM mine WHERE s.consumer = $1 AND s.key = mine.key RETURNING s.key, s.next_at)
			SELECT mine.key, next_at, runs, envelope, body, counted.message_id IS NULL FROM mine LEFT JOIN turn ON true LEFT JOIN head ON true LEFT JOIN counted ON true`
	}
	letter := func(change string) string {
		return `WITH letter AS (` + change + ` RETURNING key), turn AS (UPDATE ` + stopped + ` AS s SET next_at = clock_timestamp() FROM letter
			WHERE s.consumer = $1 AND s.key = letter.key RETURNING true)` + pgcall.Changed("letter", "turn")
	}
	outcome := func(nextAt string) string {
		return mine(`key = $5`) + `, head AS (UPDATE ` + waiting + ` SET runs = 0, attempt = $6, envelope = $7, class = $8, failed_at = $9,
				stopped_at = CASE WHEN $8::text IS NOT NULL THEN now() END FROM mine WHERE ` + ofHead + ` RETURNING mine.key),
			turn AS (UPDATE ` + stopped + ` AS s SET next_at = ` + nextAt + ` FROM head WHERE s.consumer = $1 AND s.key = head.key RETURNING true)` +
			pgcall.Changed("head", "turn")
	}
	return &parking{
		parkedRows: parkedRows{pool, consumer, waiting, names.missing()},
		stop: `WITH open AS (SELECT WHERE NOT ` + recorded + ` AND NOT EXISTS (SELECT FROM ` + waiting + ` WHERE ` + ofMessage + `)),
			fresh AS (INSERT INTO ` + stopped + ` (consumer, key) SELECT $1, $3::text FROM open ON CONFLICT DO NOTHING RETURNING true AS yes),
			stored AS (` + insert + `SELECT $1, $3, $2, $4::integer, $5::integer, $6::text, $7::bytea, $8::bytea, CASE WHEN yes THEN $9::text END, CASE WHEN yes THEN $10::timestamptz END, CASE WHEN yes THEN now() END
			FROM open LEFT JOIN fresh ON true ON CONFLICT (consumer, message_id) DO NOTHING RETURNING true)` + pgcall.Changed("open", "stored"),
		wait: insert + `SELECT $1, key, $2::uuid, $4::integer, $5::integer, $6::text, $7::bytea, $8::bytea, NULL, NULL, NULL FROM ` + stopped + ` WHERE consumer = $1 AND key = $3 FOR KEY SHARE
			ON CONFLICT (consumer, message_id) DO NOTHING`,
		there: `SELECT EXISTS (SELECT FROM ` + waiting + ` WHERE ` + ofMessage + `) OR ` + recorded + `, EXISTS (SELECT FROM ` + stopped + ` WHERE consumer = $1 AND key = $3)`,
		claim: claim(`next_at <= now() ORDER BY next_at`),
		next:  claim(`key = $3 AND next_at = $4`),
		take: mine(`key = $5`) + `, head AS (DELETE FROM ` + waiting + ` USING mine WHERE ` + ofHead + ` RETURNING message_id)
			INSERT INTO ` + names.entries + ` (consumer, message_id) SELECT $1, message_id FROM head ON CONFLICT DO NOTHING`,
		pass:    `DELETE FROM ` + waiting + ` WHERE ` + ofHead,
		retry:   outcome(`clock_timestamp() + $10::interval`),
		fail:    outcome(`'infinity'`),
		free:    `DELETE FROM ` + stopped + ` AS s WHERE consumer = $1 AND key = $2 AND NOT EXISTS (SELECT FROM ` + waiting + ` AS w WHERE w.consumer = $1 AND w.key = $2)`,
		release: mine(`key = $2 AND next_at = $3`) + `UPDATE ` + stopped + ` AS s SET next_at = clock_timestamp() FROM mine WHERE s.consumer = $1 AND s.key = mine.key`,
		count: `SELECT (SELECT count(*) FROM (SELECT FROM ` + stopped + ` WHERE consumer = $1 LIMIT $2) AS keys),
			(SELECT count(*) FROM (SELECT FROM ` + waiting + ` WHERE consumer = $1 LIMIT $2) AS messages)`,
		depths: `SELECT class, count(*), min(failed_at) FROM ` + waiting + ` WHERE consumer = $1 AND class IS NOT NULL
			GROUP BY class ORDER BY class`,
		newest: `SELECT coalesce(max(seq), 0) FROM ` + waiting + ` WHERE consumer = $1 AND class = $2`,
		page: `SELECT seq, envelope, body FROM (SELECT *, sum(octet_length(body)) OVER (ORDER BY seq) - octet_length(body) AS before
			FROM (SELECT seq, envelope, body FROM ` + waiting + ` WHERE consumer = $1 AND class = $2 AND seq > $3 AND seq <= $4
				ORDER BY seq LIMIT $5) AS found) AS page WHERE before < $6 ORDER BY seq`,
		giveBack: letter(`UPDATE ` + waiting + ` SET class = NULL, failed_at = NULL, stopped_at = NULL, runs = 0, attempt = 1,
			replays = $4, envelope = $5, body = $6 WHERE ` + ofLetter),
		remove: letter(`DELETE FROM ` + waiting + ` WHERE ` + ofLetter),
		mine:   ofHead + ` AND EXISTS (SELECT FROM ` + stopped + ` AS s WHERE s.consumer = $1 AND s.key = $5 FOR NO KEY UPDATE SKIP LOCKED)`,
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
	for range 3 { // the key may become free, and a copy may be stored, meanwhile
		_, err = p.exec(ctx, p.stop, m.ID, key, m.Replays, max(m.Attempt, 1), m.Name, envelope, bodyOf(m), dead.Class, dead.FailedAt)
		if sqlstate.Of(err) != foreignKey && !errors.Is(err, ErrIgnored) {
			return err
		}
	}
	return err
}

// foreignKey is the code of a violated foreign key: the last message of a key and the next one came at once.
const foreignKey = "23503"

// Wait implements driver.Parking.
func (p *parking) Wait(ctx context.Context, key string, m *inbox.Message) (waits bool, err error) {
	envelope, err := envelopeOf(inbox.DeadLetter{Message: *m})
	if err != nil {
		return false, err
	}
	n, err := p.exec(ctx, p.wait, m.ID, key, m.Replays, max(m.Attempt, 1), m.Name, envelope, bodyOf(m))
	if err != nil || n > 0 {
		return err == nil, err
	}
	return p.found(ctx, key, m.ID)
}

// found reports whether a message is kept that a statement did not store. A message that is not kept although its key is
// stopped was ignored.
func (p *parking) found(ctx context.Context, key string, id uuid.UUID) (kept bool, err error) {
	var stopped bool
	err = p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, p.there, p.consumer, id, key).Scan(&kept, &stopped)
	})
	if err == nil && stopped && !kept {
		err = p.ignored(id)
	}
	return kept, err
}

// Claim implements driver.Parking.
func (p *parking) Claim(ctx context.Context, lease time.Duration) (*driver.Head, error) {
	return p.claimed(ctx, p.claim, lease)
}

// Next implements driver.Parking.
func (p *parking) Next(ctx context.Context, h *driver.Head, lease time.Duration) (*driver.Head, error) {
	return p.claimed(ctx, p.next, lease, h.Key, h.Until)
}

func (p *parking) claimed(ctx context.Context, sql string, args ...any) (*driver.Head, error) {
	ctx, cancel := context.WithTimeout(ctx, parkingTimeout)
	defer cancel()
	h := &driver.Head{}
	var until *time.Time
	var runs *int
	var envelope, body []byte
	var uncounted bool
	err := pgcall.Use(ctx, p.pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		queue := &pgx.Batch{}
		queue.Queue(`BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`)
		queue.Queue(sql, append([]any{p.consumer}, args...)...).QueryRow(func(row pgx.Row) error {
			err := row.Scan(&h.Key, &until, &runs, &envelope, &body, &uncounted)
			body = append([]byte(nil), body...) // the client uses its memory again
			return err
		})
		queue.Queue(`COMMIT`)
		return conn.SendBatch(ctx, queue).Close()
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, nil
	case err != nil:
		return nil, p.wrap(err)
	case until == nil:
		return nil, p.ignored("of key " + h.Key)
	}
	h.Until = *until
	if envelope == nil {
		return h, nil
	}
	dead, err := letterOf(envelope, body)
	if err != nil {
		return nil, err
	}
	h.Message, h.Runs = &dead.Message, *runs
	if uncounted { // another process was faster, or the table ignored the change
		return nil, p.ended(ctx, 0, nil, ofHead, p.head(h)[1:4]...)
	}
	return h, nil
}

// Take implements driver.Parking.
func (p *parking) Take(ctx context.Context, tx pgx.Tx, h *driver.Head) (first bool, err error) {
	tag, err := tx.Exec(ctx, p.take, p.head(h)...)
	if err != nil {
		return false, p.wrap(err)
	}
	return tag.RowsAffected() == 1, nil
}

// atBegin is Take as a statement that travels with BEGIN.
func (p *parking) atBegin(h *driver.Head) txdriver.Statement {
	return txdriver.Statement{SQL: p.take, Args: p.head(h)}
}

func (p *parking) head(h *driver.Head, args ...any) []any {
	return append([]any{p.consumer, uuidOf(h.Message.ID), h.Message.Replays, max(h.Message.Attempt, 1), h.Key}, args...)
}

// Pass implements driver.Parking.
func (p *parking) Pass(ctx context.Context, h *driver.Head) error {
	return p.change(ctx, h, p.pass, p.head(h)[1:4]...)
}

// Retry implements driver.Parking.
func (p *parking) Retry(ctx context.Context, h *driver.Head, next *inbox.Message, delay time.Duration) error {
	envelope, err := envelopeOf(inbox.DeadLetter{Message: *next})
	if err != nil {
		return err
	}
	return p.change(ctx, h, p.retry, p.head(h, max(next.Attempt, 1), envelope, nil, nil, delay)[1:]...)
}

// Fail implements driver.Parking.
func (p *parking) Fail(ctx context.Context, h *driver.Head, dead inbox.DeadLetter) error {
	dead.FailedAt = dead.FailedAt.Truncate(time.Microsecond) // as Postgres keeps it
	envelope, err := envelopeOf(dead)
	if err != nil {
		return err
	}
	return p.change(ctx, h, p.fail, p.head(h, max(dead.Message.Attempt, 1), envelope, dead.Class, dead.FailedAt)[1:]...)
}

// change changes the message of a head, unless another process runs it.
func (p *parking) change(ctx context.Context, h *driver.Head, sql string, args ...any) error {
	n, err := p.exec(ctx, sql, args...)
	return p.ended(ctx, n, err, p.mine, p.head(h)[1:]...)
}

// Release implements driver.Parking.
func (p *parking) Release(ctx context.Context, h *driver.Head) error {
	n, err := p.exec(ctx, p.free, h.Key)
	if n > 0 || err != nil && sqlstate.Of(err) != foreignKey {
		return err
	}
	_, err = p.exec(ctx, p.release, h.Key, h.Until)
	return err
}

// Count implements driver.Parking.
func (p *parking) Count(ctx context.Context, most int) (keys, messages int, err error) {
	err = p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, p.count, p.consumer, most).Scan(&keys, &messages)
	})
	return keys, messages, err
}

// Depths implements driver.DeadLetters.
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

// Scan implements driver.DeadLetters.
func (p *parking) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (inboxdriver.Outcome, error), failed func(inbox.DeadLetter, error),
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
func (p *parking) end(ctx context.Context, dead inbox.DeadLetter, fate inboxdriver.Outcome) error {
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
func (p *parking) ended(ctx context.Context, n int64, err error, where string, args ...any) error {
	if err != nil || n > 0 {
		return err
	}
	left, err := p.finds(ctx, where, args...)
	if err == nil && left {
		err = p.ignored(args[0])
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

func (p parkedRows) ignored(id any) error {
	if u, ok := id.(pgtype.UUID); ok {
		id = uuid.UUID(u.Bytes)
	}
	return p.wrap(pgcall.Ignored(p.table, fmt.Sprintf("a change of message %v", id)))
}

func (p parkedRows) read(ctx context.Context, fn func(context.Context, *pgxpool.Conn) error) error {
	return p.wrap(pgcall.Twice(ctx, p.pool, parkingTimeout, fn))
}

func (p parkedRows) exec(ctx context.Context, sql string, args ...any) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, parkingTimeout)
	defer cancel()
	n, err := pgcall.Exec(ctx, p.pool, sql, append([]any{p.consumer}, args...)...)
	return n, p.wrap(pgcall.ExplainOneRow(p.table, err))
}

func (p parkedRows) wrap(err error) error {
	if err != nil {
		return fmt.Errorf("inboxpgx: parking: %w", p.missing.Explain(err))
	}
	return nil
}
