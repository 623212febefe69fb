package inboxpgx

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

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

	// A scan reads this many dead letters at once, and bodies up to this many bytes, but at least one dead
	// letter.
	scanPage  = 100
	scanBytes = 4 << 20
)

// parking is the driver.Parking in Postgres. Its statements run at READ COMMITTED, each in a transaction of
// its own, except Take. They lock the row of the key before the rows of its messages. Statements about dead
// letters do not, because nobody can claim their keys.
//
//   - An arrival, Wait, locks the key's row FOR KEY SHARE. It waits only for the end of the key.
//   - A run, Take, holds FOR NO KEY UPDATE until its transaction ends. Claims skip the row. Next deletes the
//     message after that: in a SERIALIZABLE transaction the scan for it would conflict with the runs of other
//     keys.
//   - The end, Release, deletes the row, and waits for arrivals. The foreign key rejects the deletion if one
//     of them has stored a message.
type parking struct {
	pool     *pgxpool.Pool
	consumer string
	table    string
	missing  migrate.Missing

	stop, wait, there, claim, next, take, retry, fail, giveBack, free, count string
	depths, newest, page, replay, remove                                     string
}

func newParking(pool *pgxpool.Pool, names tables, consumer string) *parking {
	stopped, waiting := names.stopped, names.waiting
	const ofMessage = `consumer = $1 AND message_id = $2`
	insert := `INSERT INTO ` + waiting + ` (consumer, key, message_id, envelope, body, class, failed_at) `
	recorded := `EXISTS (SELECT FROM ` + names.entries + ` WHERE ` + ofMessage + `)`
	// mine locks the row of a key if the claim has not ended. The message of the claim is $4.
	const ofClaim = ` WHERE consumer = $1 AND key = $2 AND next_at = $3 FOR NO KEY UPDATE`
	mine := `WITH mine AS (SELECT key FROM ` + stopped + ofClaim + `)`
	claimed := func(lease, done string) string {
		return `, turn AS (UPDATE ` + stopped + ` AS s SET next_at = clock_timestamp() + ` + lease + `::interval FROM mine
				WHERE s.consumer = $1 AND s.key = mine.key RETURNING s.next_at),
			counted AS (UPDATE ` + waiting + ` AS w SET runs = w.runs + 1 FROM head, turn
				WHERE w.consumer = $1 AND w.message_id = head.message_id AND w.class IS NULL RETURNING w.runs - 1 AS runs, envelope, body)
			SELECT key, next_at, head.message_id, runs, envelope, body, ` + done + `
			FROM mine LEFT JOIN turn ON true LEFT JOIN head ON true LEFT JOIN counted ON true`
	}
	outcome := func(set, turn string) string {
		return mine + `, head AS (UPDATE ` + waiting + ` AS w SET ` + set + ` FROM mine WHERE w.consumer = $1 AND w.message_id = $4 RETURNING mine.key),
			turn AS (UPDATE ` + stopped + ` AS s SET ` + turn + ` FROM head WHERE s.consumer = $1 AND s.key = head.key RETURNING true)` +
			pgcall.Changed("mine", "turn")
	}
	letter := func(entry, change string) string {
		return `WITH found AS (SELECT key FROM ` + waiting + ` WHERE ` + ofMessage + ` AND class IS NOT NULL AND failed_at = $3 FOR UPDATE),
			entry AS (` + entry + `),
			letter AS (` + change + ` WHERE ` + ofMessage + ` AND EXISTS (SELECT FROM entry) RETURNING key),
			turn AS (UPDATE ` + stopped + ` AS s SET next_at = clock_timestamp() FROM letter WHERE s.consumer = $1 AND s.key = letter.key RETURNING true)` +
			pgcall.Changed("found", "turn")
	}
	rest := `EXISTS (SELECT FROM ` + waiting + ` AS w WHERE w.consumer = $1 AND w.key = mine.key)`
	return &parking{
		pool: pool, consumer: consumer, table: waiting, missing: names.missing(),
		stop: `WITH open AS (SELECT WHERE NOT ` + recorded + ` AND NOT EXISTS (SELECT FROM ` + waiting + ` WHERE ` + ofMessage + `)),
			fresh AS (INSERT INTO ` + stopped + ` (consumer, key) SELECT $1, $3::text FROM open ON CONFLICT DO NOTHING RETURNING true AS yes),
			stored AS (` + insert + `SELECT $1, $3, $2, $4::bytea, $5::bytea, CASE WHEN yes THEN $6::text END, CASE WHEN yes THEN $7::timestamptz END
			FROM open LEFT JOIN fresh ON true ON CONFLICT (consumer, message_id) DO NOTHING RETURNING true)` + pgcall.Changed("open", "stored"),
		wait: insert + `SELECT $1, key, $2::uuid, $4::bytea, $5::bytea, NULL, NULL FROM ` + stopped + ` WHERE consumer = $1 AND key = $3 FOR KEY SHARE
			ON CONFLICT (consumer, message_id) DO NOTHING`,
		there: `SELECT EXISTS (SELECT FROM ` + waiting + ` WHERE ` + ofMessage + `) OR ` + recorded + `, EXISTS (SELECT FROM ` + stopped + ` WHERE consumer = $1 AND key = $3)`,
		claim: `WITH mine AS (SELECT key FROM ` + stopped + ` WHERE consumer = $1 AND next_at <= now() ORDER BY next_at LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED),
			head AS (SELECT message_id FROM ` + waiting + ` WHERE consumer = $1 AND key = (SELECT key FROM mine) ORDER BY seq LIMIT 1)` + claimed("$2", "true"),
		next: mine + `, gone AS (DELETE FROM ` + waiting + ` AS w USING mine WHERE w.consumer = $1 AND w.message_id = $4 RETURNING w.message_id),
			head AS (SELECT message_id FROM ` + waiting + ` WHERE consumer = $1 AND key = (SELECT key FROM mine) AND message_id <> (SELECT message_id FROM gone)
				ORDER BY seq LIMIT 1)` + claimed("$5", "EXISTS (SELECT FROM gone)"),
		take: `WITH mine AS (SELECT key FROM ` + stopped + ofClaim + ` SKIP LOCKED)
			INSERT INTO ` + names.entries + ` (consumer, message_id) SELECT $1, $4::uuid FROM mine ON CONFLICT DO NOTHING`,
		retry:    outcome(`runs = 0, envelope = $5`, `next_at = clock_timestamp() + $6::interval`),
		fail:     outcome(`runs = 0, envelope = $5, class = $6, failed_at = $7`, `next_at = 'infinity', since = now()`),
		giveBack: outcome(`runs = $5`, `next_at = CASE WHEN $5 > 0 THEN '-infinity' ELSE clock_timestamp() END`),
		free: mine + `, free AS (DELETE FROM ` + stopped + ` AS s USING mine WHERE s.consumer = $1 AND s.key = mine.key AND NOT ` + rest + ` RETURNING true),
			turn AS (UPDATE ` + stopped + ` AS s SET next_at = clock_timestamp() FROM mine WHERE s.consumer = $1 AND s.key = mine.key AND ` + rest + ` RETURNING true),
			either AS (SELECT FROM free UNION ALL SELECT FROM turn)` + pgcall.Changed("mine", "either"),
		count: `SELECT (SELECT count(*) FROM (SELECT FROM ` + stopped + ` WHERE consumer = $1 LIMIT $2) AS keys),
			(SELECT count(*) FROM (SELECT FROM ` + waiting + ` WHERE consumer = $1 LIMIT $2) AS messages)`,
		depths: `SELECT class, count(*), min(failed_at) FROM ` + waiting + ` WHERE consumer = $1 AND class IS NOT NULL
			GROUP BY class ORDER BY class`,
		newest: `SELECT coalesce(max(seq), 0) FROM ` + waiting + ` WHERE consumer = $1 AND class = $2`,
		page: `SELECT seq, envelope, body FROM (SELECT *, sum(octet_length(body)) OVER (ORDER BY seq) - octet_length(body) AS before
			FROM (SELECT seq, envelope, body FROM ` + waiting + ` WHERE consumer = $1 AND class = $2 AND seq > $3 AND seq <= $4
				ORDER BY seq LIMIT $5) AS found) AS page WHERE before < $6 ORDER BY seq`,
		replay: letter(`SELECT FROM found`, `UPDATE `+waiting+` SET class = NULL, failed_at = NULL, runs = 0, envelope = $4, body = $5`),
		remove: letter(`INSERT INTO `+names.entries+` (consumer, message_id) SELECT $1, $2::uuid FROM found
				ON CONFLICT (consumer, message_id) DO UPDATE SET processed_at = now() RETURNING true`, `DELETE FROM `+waiting),
	}
}

// foreignKey is the code of a violated foreign key: the next message of a key arrived together with the end
// of the last.
const foreignKey = "23503"

// Stop implements driver.Parking.
func (p *parking) Stop(ctx context.Context, key string, dead inbox.DeadLetter) error {
	dead.FailedAt = dead.FailedAt.Truncate(time.Microsecond) // the precision of Postgres
	envelope, err := envelopeOf(dead)
	if err != nil {
		return err
	}
	for range 3 { // the key may become free, and a copy may be stored, meanwhile
		err = p.exec(ctx, p.stop, uuidOf(dead.Message.ID), key, envelope, bodyOf(&dead.Message), dead.Class, dead.FailedAt)
		if sqlstate.Of(err) != foreignKey && !errors.Is(err, ErrIgnored) {
			return err
		}
	}
	return err
}

// Wait implements driver.Parking.
func (p *parking) Wait(ctx context.Context, key string, m *inbox.Message, full bool) (waits bool, err error) {
	look := func() (missing bool, err error) {
		var stopped bool
		err = p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
			return conn.QueryRow(ctx, p.there, p.consumer, uuidOf(m.ID), key).Scan(&waits, &stopped)
		})
		return stopped && !waits, err
	}
	if full {
		missing, err := look()
		if err == nil && missing {
			err = driver.ErrFull
		}
		return waits, err
	}
	envelope, err := envelopeOf(inbox.DeadLetter{Message: *m})
	if err != nil {
		return false, err
	}
	ignored, err := pgcall.Changes(func() (int64, error) {
		n, err := pgcall.Exec(ctx, p.pool, p.wait, p.consumer, uuidOf(m.ID), key, envelope, bodyOf(m))
		waits = n > 0
		return n, p.wrap(err)
	}, look)
	if ignored {
		err = p.ignored(fmt.Sprint("message ", m.ID))
	}
	return waits, err
}

// Claim implements driver.Parking.
func (p *parking) Claim(ctx context.Context, lease time.Duration) (*driver.Head, error) {
	return p.claimed(ctx, p.claim, p.consumer, lease)
}

// Next implements driver.Parking.
func (p *parking) Next(ctx context.Context, h *driver.Head, lease time.Duration) (*driver.Head, error) {
	return p.claimed(ctx, p.next, p.of(h, lease)...)
}

func (p *parking) claimed(ctx context.Context, sql string, args ...any) (*driver.Head, error) {
	ctx, cancel := context.WithTimeout(ctx, parkingTimeout)
	defer cancel()
	h := &driver.Head{}
	var until *time.Time
	var id pgtype.UUID
	var runs *int
	var envelope, body []byte
	var done bool
	err := pgcall.Use(ctx, p.pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		queue := &pgx.Batch{}
		queue.Queue(`BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`)
		queue.Queue(sql, args...).QueryRow(func(row pgx.Row) error {
			err := row.Scan(&h.Key, &until, &id, &runs, &envelope, &body, &done)
			body = append([]byte(nil), body...) // the client reuses its memory
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
	case until == nil || !done || id.Valid && runs == nil:
		return nil, p.ignored("the claim of key " + h.Key)
	}
	h.Until = *until
	if !id.Valid {
		return h, nil
	}
	dead, err := letterOf(envelope, body)
	if err != nil {
		return nil, err
	}
	h.Message, h.Runs = &dead.Message, *runs
	return h, nil
}

// Take implements driver.Parking.
func (p *parking) Take(ctx context.Context, tx pgx.Tx, h *driver.Head) (first bool, err error) {
	tag, err := tx.Exec(ctx, p.take, p.of(h)...)
	if err != nil {
		return false, p.wrap(err)
	}
	return tag.RowsAffected() == 1, nil
}

// atBegin returns the statement of Take, to be sent together with BEGIN.
func (p *parking) atBegin(h *driver.Head) txdriver.Statement {
	return txdriver.Statement{SQL: p.take, Args: p.of(h)}
}

// of returns the arguments of a statement about the message of a head.
func (p *parking) of(h *driver.Head, args ...any) []any {
	return append([]any{p.consumer, h.Key, h.Until, uuidOf(h.Message.ID)}, args...)
}

// Retry implements driver.Parking.
func (p *parking) Retry(ctx context.Context, h *driver.Head, next *inbox.Message, delay time.Duration) error {
	envelope, err := envelopeOf(inbox.DeadLetter{Message: *next})
	if err != nil {
		return err
	}
	return p.exec(ctx, p.retry, p.of(h, envelope, delay)[1:]...)
}

// Fail implements driver.Parking.
func (p *parking) Fail(ctx context.Context, h *driver.Head, dead inbox.DeadLetter) error {
	dead.FailedAt = dead.FailedAt.Truncate(time.Microsecond) // the precision of Postgres
	envelope, err := envelopeOf(dead)
	if err != nil {
		return err
	}
	return p.exec(ctx, p.fail, p.of(h, envelope, dead.Class, dead.FailedAt)[1:]...)
}

// Release implements driver.Parking.
func (p *parking) Release(ctx context.Context, h *driver.Head) error {
	if h.Message != nil {
		return p.exec(ctx, p.giveBack, p.of(h, h.Runs)[1:]...)
	}
	err := p.exec(ctx, p.free, h.Key, h.Until)
	if sqlstate.Of(err) == foreignKey { // a message arrived at the same time, and is visible now
		err = p.exec(ctx, p.free, h.Key, h.Until)
	}
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

// concernsOne reports whether a failure concerns one dead letter only: the server has replied and works for
// the others.
func concernsOne(err error) bool {
	if errors.Is(err, ErrIgnored) || errors.Is(err, inboxdriver.ErrGone) {
		return true
	}
	answer, answered := errors.AsType[*pgconn.PgError](err)
	return answered && !sqlstate.Unavailable(err) && !slices.Contains([]string{"25", "42", "57", "58"}, answer.Code[:2])
}

// letters reads the next dead letters of a class, and the number of the last one.
func (p *parking) letters(ctx context.Context, class string, after, last int64) (page []inbox.DeadLetter, upTo int64, err error) {
	err = p.read(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		page = nil // this may be the second try
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

// end applies an outcome to a dead letter, unless another call was faster.
func (p *parking) end(ctx context.Context, dead inbox.DeadLetter, fate inboxdriver.Outcome) error {
	switch fate {
	case inboxdriver.Drop:
		return p.endOne(ctx, p.remove, uuidOf(dead.Message.ID), dead.FailedAt)
	case inboxdriver.Return:
		m := dead.Message
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = 1, 0, time.Time{}, nil
		m.Replays++
		envelope, err := envelopeOf(inbox.DeadLetter{Message: m})
		if err != nil {
			return err
		}
		return p.endOne(ctx, p.replay, uuidOf(m.ID), dead.FailedAt, envelope, bodyOf(&m))
	}
	return nil
}

// endOne runs replay or remove. They return a row for the dead letter that they have found.
func (p *parking) endOne(ctx context.Context, sql string, args ...any) error {
	found, err := p.run(ctx, sql, args...)
	if err == nil && found == 0 {
		return inboxdriver.ErrGone
	}
	return err
}

// envelopeOf returns a message, or a dead letter, without its body, as JSON.
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

// kept returns a time that JSON can represent, or zero. A sender's time may be anything, such as the year
// 55840 if milliseconds were read as seconds.
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
	dead.Message.Body = append([]byte(nil), body...) // the client reuses its memory
	return dead, nil
}

// bodyOf returns a message's body for a column that is never null.
func bodyOf(m *inbox.Message) []byte { return append([]byte{}, m.Body...) }

func (p *parking) read(ctx context.Context, fn func(context.Context, *pgxpool.Conn) error) error {
	return p.wrap(pgcall.Twice(ctx, p.pool, parkingTimeout, fn))
}

// exec runs a statement about the consumer. It is not an error if it changes nothing.
func (p *parking) exec(ctx context.Context, sql string, args ...any) error {
	_, err := p.run(ctx, sql, args...)
	return err
}

// run is exec that also returns the number of rows.
func (p *parking) run(ctx context.Context, sql string, args ...any) (rows int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, parkingTimeout)
	defer cancel()
	rows, err = pgcall.Exec(ctx, p.pool, sql, append([]any{p.consumer}, args...)...)
	return rows, p.wrap(pgcall.ExplainOneRow(p.table, err))
}

func (p *parking) ignored(change string) error { return p.wrap(pgcall.Ignored(p.table, change)) }

func (p *parking) wrap(err error) error {
	if err != nil {
		return fmt.Errorf("inboxpgx: parking: %w", p.missing.Explain(err))
	}
	return nil
}
