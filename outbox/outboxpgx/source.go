package outboxpgx

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/outbox"
)

// SourceConfig tunes a Source. The zero value works.
type SourceConfig struct {
	// Schema and Table are as in SchemaConfig.
	Schema, Table string
	// LanesPerClaim is how many of the outbox.Lanes lanes one claim takes at most. Fewer leave more
	// to other relays, more fill a batch better. Default 4.
	LanesPerClaim int
	// MaxBatchBytes bounds the bodies of one batch; its first message is always taken. Default
	// 32 MiB.
	MaxBatchBytes int64
	// Retention keeps published messages, with published_at, until Prune finds them older than
	// this. 0 means that they are deleted as soon as they are confirmed.
	Retention time.Duration
}

// Source is the outbox.Source of the table. It is safe for concurrent use, by any number of relays
// in any number of processes. It works behind a pooler in transaction mode.
type Source struct {
	pool *pgxpool.Pool
	cfg  SourceConfig
	t    tables
	sql  statements

	horizon horizon
}

// NewSource returns a Source. The pool needs two connections per relay.
func NewSource(pool *pgxpool.Pool, cfg SourceConfig) (*Source, error) {
	if cfg.LanesPerClaim == 0 {
		cfg.LanesPerClaim = 4
	}
	if cfg.MaxBatchBytes == 0 {
		cfg.MaxBatchBytes = 32 << 20
	}
	t, err := SchemaConfig{cfg.Schema, cfg.Table}.tables()
	errs := []error{err}
	if pool == nil {
		errs = append(errs, errors.New("outboxpgx: NewSource needs a pool"))
	}
	if cfg.LanesPerClaim < 0 || cfg.LanesPerClaim > outbox.Lanes {
		errs = append(errs, fmt.Errorf("outboxpgx: SourceConfig.LanesPerClaim is %d, want 1 to %d", cfg.LanesPerClaim, outbox.Lanes))
	}
	if cfg.MaxBatchBytes < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: SourceConfig.MaxBatchBytes is %d, want more than 0", cfg.MaxBatchBytes))
	}
	if cfg.Retention < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: SourceConfig.Retention is %v, want 0 or more", cfg.Retention))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Source{pool: pool, cfg: cfg, t: t, sql: t.statements()}, nil
}

// Claim meets outbox.Source. It writes the lanes, and the messages whose next attempt is due.
func (s *Source) Claim(ctx context.Context, req outbox.ClaimRequest) (outbox.Batch, error) {
	if req.Limit < 1 || req.Lease < time.Microsecond {
		return outbox.Batch{}, fmt.Errorf("outboxpgx: claim of %d messages for %v", req.Limit, req.Lease)
	}
	if req.Skip == nil {
		req.Skip = []string{}
	}
	var c claimed
	if err := s.pool.SendBatch(ctx, s.claim(req, &c)).Close(); err != nil {
		s.horizon.forget()
		return outbox.Batch{}, fmt.Errorf("outboxpgx: claim: %w", err)
	}
	s.horizon.saw(c.seen)
	return c.batch, nil
}

// claimed is what a claim reads.
type claimed struct {
	batch outbox.Batch
	seen  int64 // the highest sequence number
}

func (s *Source) claim(req outbox.ClaimRequest, c *claimed) *pgx.Batch {
	token := newToken()
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(s.sql.setup)
	queue.Queue(s.sql.hurry)
	queue.Queue(s.sql.promote)
	if s.horizon.below() {
		queue.Queue(s.sql.lower)
	}
	queue.Queue(s.sql.lease, token, req.Lease.Microseconds(), s.cfg.LanesPerClaim, req.Skip).Query(func(rows pgx.Rows) (err error) {
		c.batch.Leases, err = pgx.CollectRows(rows, pgx.RowToStructByPos[outbox.Lease])
		c.batch.More = len(c.batch.Leases) == s.cfg.LanesPerClaim
		return err
	})
	queue.Queue(s.sql.read, token, req.Limit, req.Skip, s.cfg.MaxBatchBytes).Query(c.read)
	queue.Queue(s.sql.due).Query(func(rows pgx.Rows) error {
		us, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if len(us) > 0 {
			c.batch.Due = time.Duration(us[0]) * time.Microsecond
		}
		return err
	})
	queue.Queue(commitSQL)
	return queue
}

// newToken returns a number that no other claim has, of whatever process or time.
func newToken() int64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // it never fails
	return int64(binary.BigEndian.Uint64(b[:]))
}

// read scans the rows in place, since half of what a message costs here is its memory. The id is
// scanned as bytes: of a uuid.UUID the client makes a text first.
func (c *claimed) read(rows pgx.Rows) error {
	defer rows.Close()
	var key *string
	var seq int64
	for rows.Next() {
		c.batch.Messages = append(c.batch.Messages, outbox.Message{})
		m := &c.batch.Messages[len(c.batch.Messages)-1]
		err := rows.Scan((*[16]byte)(&m.ID), &m.Name, &m.Body, &m.ContentType, &m.Headers, &key, &m.Transport,
			&m.Route.Exchange, &m.Route.RoutingKey, &m.Route.Headers, &m.CreatedAt, &m.Attempts, &seq)
		if err != nil {
			return err
		}
		if key != nil {
			m.Key = *key
		}
		c.seen = max(c.seen, seq)
	}
	return rows.Err()
}

// Settle meets outbox.Source.
func (s *Source) Settle(ctx context.Context, b outbox.Batch, outcomes []outbox.Outcome) ([]outbox.Lease, error) {
	if len(b.Leases) == 0 {
		return nil, nil
	}
	lanes, tokens := make([]int16, len(b.Leases)), make([]int64, len(b.Leases))
	for i, l := range b.Leases {
		lanes[i], tokens[i] = int16(l.Lane), l.Token
	}
	held := map[int16]bool{}
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(s.sql.setup)
	queue.Queue(s.sql.hold, lanes, tokens).Query(func(rows pgx.Rows) error {
		got, err := pgx.CollectRows(rows, pgx.RowTo[int16])
		for _, lane := range got {
			held[lane] = true
		}
		return err
	})
	s.settlement(queue, lanes, tokens, outcomes)
	queue.Queue(s.sql.close, lanes, tokens, s.horizon.limit())
	ask := s.horizon.question()
	var writers []string
	if ask != 0 {
		queue.Queue(s.sql.writers, s.t.outbox).Query(func(rows pgx.Rows) (err error) {
			writers, err = pgx.CollectRows(rows, pgx.RowTo[string])
			return err
		})
	}
	queue.Queue(commitSQL)
	if err := s.pool.SendBatch(ctx, queue).Close(); err != nil {
		s.horizon.forget()
		return nil, fmt.Errorf("outboxpgx: settle: %w", err)
	}
	s.horizon.answer(ask, writers)
	var stale []outbox.Lease
	for _, l := range b.Leases {
		if !held[int16(l.Lane)] {
			stale = append(stale, l)
		}
	}
	return stale, nil
}

// settlement queues one statement for each verdict that occurs.
func (s *Source) settlement(queue *pgx.Batch, lanes []int16, tokens []int64, outcomes []outbox.Outcome) {
	by := map[outbox.Verdict]*columnsOf{}
	for _, v := range []outbox.Verdict{outbox.Published, outbox.Failed, outbox.Dead} {
		by[v] = &columnsOf{}
	}
	for _, o := range outcomes {
		if c := by[o.Verdict]; c != nil {
			c.add(o)
		}
	}
	if c := by[outbox.Published]; len(c.ids) > 0 {
		sql := s.sql.published
		if s.cfg.Retention > 0 {
			sql = s.sql.kept
		}
		queue.Queue(sql, lanes, tokens, c.ids)
	}
	if c := by[outbox.Failed]; len(c.ids) > 0 {
		queue.Queue(s.sql.failed, lanes, tokens, c.ids, c.delays, c.classes, c.errors)
	}
	if c := by[outbox.Dead]; len(c.ids) > 0 {
		queue.Queue(s.sql.dead, lanes, tokens, c.ids, c.classes, c.errors)
	}
}

// uuids is an array that the client encodes in binary. Of []uuid.UUID it makes texts first, twenty
// times as much work, and without prepared statements it knows no such array.
type uuids = pgtype.FlatArray[pgtype.UUID]

// columnsOf are outcomes as one array per column.
type columnsOf struct {
	ids     uuids
	delays  []int64 // microseconds
	classes []string
	errors  []string
}

func (c *columnsOf) add(o outbox.Outcome) {
	c.ids = append(c.ids, pgtype.UUID{Bytes: o.ID, Valid: true})
	c.delays = append(c.delays, o.Delay.Microseconds())
	c.classes = append(c.classes, string(o.Class))
	c.errors = append(c.errors, o.Err)
}
