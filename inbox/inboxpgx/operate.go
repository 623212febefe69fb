package inboxpgx

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/internal/actor"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgpause"
	"github.com/holdfast-go/holdfast/internal/pgprune"
)

// pausePoll is the interval at which a consumer checks whether another process has paused it.
const pausePoll = 2 * time.Second

// pausing is the pause of a Store's consumer.
type pausing struct {
	mu      sync.Mutex
	changed chan struct{}     // closed when this process has changed the pause; nil: nobody waits
	kept    inboxdriver.Pause // with Config.Entries
}

// Pause implements driver.Pausable of inbox. With Config.Entries it applies to this Store only.
func (s *Store) Pause(ctx context.Context, by, reason string) error {
	defer s.pausing.tell()
	if s.table != nil {
		return pauseError("pause", s.pause().Set(ctx, by, reason))
	}
	if err := actor.Check("by", "reason", by, reason); err != nil {
		return pauseError("pause", err)
	}
	s.pausing.keep(func(p *inboxdriver.Pause) {
		p.By, p.Reason = by, reason
		if p.Since.IsZero() {
			p.Since = time.Now()
		}
	})
	return nil
}

// Resume implements driver.Pausable of inbox.
func (s *Store) Resume(ctx context.Context) error {
	defer s.pausing.tell()
	if s.table != nil {
		return pauseError("resume", s.pause().Clear(ctx))
	}
	s.pausing.keep(func(p *inboxdriver.Pause) { *p = inboxdriver.Pause{} })
	return nil
}

// Paused implements driver.Pausable of inbox.
func (s *Store) Paused(ctx context.Context) (inboxdriver.Pause, error) {
	if s.table != nil {
		state, err := s.pause().Get(ctx)
		return state, pauseError("paused", err)
	}
	s.pausing.mu.Lock()
	defer s.pausing.mu.Unlock()
	return s.pausing.kept, nil
}

// WatchPause implements driver.Pausable of inbox. It notices changes by other processes within 2 s.
func (s *Store) WatchPause(ctx context.Context, tell func(inboxdriver.Pause)) {
	var told *inboxdriver.Pause
	for ctx.Err() == nil {
		changed := s.pausing.wait()
		now, err := s.Paused(ctx)
		if told == nil || err == nil && now != *told {
			tell(now)
			told = &now
		}
		var poll <-chan time.Time
		if s.table != nil {
			poll = time.After(pausePoll)
		}
		select {
		case <-ctx.Done():
		case <-changed:
		case <-poll:
		}
	}
}

func (s *Store) pause() pgpause.Switch {
	return pgpause.Switch{Pool: s.pool, Table: s.table.names.pause, Part: s.consumer, Missing: s.table.missing}
}

func pauseError(what string, err error) error {
	if err != nil {
		return fmt.Errorf("inboxpgx: %s: %w", what, err)
	}
	return nil
}

func (p *pausing) keep(change func(*inboxdriver.Pause)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.kept)
}

// wait returns a channel that tell closes.
func (p *pausing) wait() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return p.changed
}

func (p *pausing) tell() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// rounding is how much later than its stored time an entry may have been made.
const rounding = 500 * time.Millisecond

// newPruner deletes the consumer's entries older than the retention by the database's clock, except the
// entries of parked messages, and the ledger's rows not updated for as long.
func newPruner(pool *pgxpool.Pool, names tables, consumer string, cfg Config) (*pgprune.Pruner, error) {
	// Tuple ids are safe here: the rows are locked when they are read.
	older := func(table, column string, than time.Duration, unless string) pgprune.Statement {
		due := `consumer = $1 AND ` + column + ` < now() - $2::interval` + unless
		return pgprune.Statement{Table: table, ID: "ctid", Also: due, Due: due + ` ORDER BY ` + column, Args: []any{consumer, than}}
	}
	return pgprune.New(pgprune.Config{
		Pool: pool, Table: names.entries, Core: "inbox",
		// The ledger's table is small, and needs no index for this.
		Statements: []pgprune.Statement{
			older(names.entries, "processed_at", later(cfg.Retention, rounding), andNotParked(names, names.entries)),
			older(names.attempts, "updated_at", cfg.Retention, ""),
		},
		Interval: cfg.PruneInterval,
		Explain:  names.missing().Explain,
		Logger:   cfg.Logger, MeterProvider: cfg.MeterProvider,
	})
}

// andNotParked excludes the entries of waiting messages. A copy of a processed message may be parked behind a
// dead letter for longer than the retention, and its entry must exist when its turn comes.
func andNotParked(names tables, entry string) string {
	return ` AND NOT EXISTS (SELECT FROM ` + names.waiting + ` w WHERE w.consumer = ` + entry + `.consumer AND w.message_id = ` + entry + `.message_id)`
}

// Background implements driver.Background of inbox: while a consumer runs, it prunes every
// Config.PruneInterval, and processes the messages of stopped keys that may continue.
func (s *Store) Background(ctx context.Context) {
	var all sync.WaitGroup
	if s.pruner != nil {
		all.Go(func() { s.pruner.Run(ctx) })
	}
	all.Go(func() { s.drain(ctx) })
	all.Wait()
}

// later returns the sum, also for an endless retention.
func later(retention, by time.Duration) time.Duration {
	return retention + min(by, math.MaxInt64-retention)
}

// Prune deletes the entries of this consumer older than Config.Retention by the database's clock, and the
// ledger's rows not updated for as long, in small transactions. The entry of a parked message
// (inbox.ConsumerConfig.ParkKeys) stays while the message waits. Prune returns the number of deleted rows,
// also with an error. It may run in several processes at once, and beside consumers. With Config.Entries it
// does nothing.
func (s *Store) Prune(ctx context.Context) (int, error) {
	if s.pruner == nil {
		return 0, nil
	}
	return s.pruner.Prune(ctx)
}

// Prunable returns how many rows Prune would delete now. Each kind is counted up to 100,000, which means at
// least that many.
func (s *Store) Prunable(ctx context.Context) (int, error) {
	if s.pruner == nil {
		return 0, nil
	}
	return s.pruner.Count(ctx)
}

// countLimit is the maximum of the counts; it means at least that many.
const countLimit = 100_000

// countTimeout bounds one try of a count.
const countTimeout = 4 * time.Second

// Processed returns how many messages the consumer has processed in the last d, by the clock of the entries:
// at most 100,000, which means at least that many.
func (s *Store) Processed(ctx context.Context, d time.Duration) (int, error) {
	return s.entries.Processed(ctx, s.consumer, d)
}

// Look returns when the consumer processed a message, since when the message waits for its ordering key, and the dead letter that
// stopped the key. A zero time means that the store has none: the consumer has not processed the message, or its entry was pruned
// after Config.Retention. Look may take 4 s, and 4 s more on another connection.
func (s *Store) Look(ctx context.Context, id uuid.UUID) (driver.Known, error) {
	return s.entries.Look(ctx, s.consumer, id)
}

// behindListed bounds the messages that Behind returns.
const behindListed = 100

// Behind returns the first 100 messages that wait behind a dead letter that stopped its ordering key, and the number of all: at
// most 100,000, which means at least that many. There are none if keys are not parked, and with Config.Entries.
func (s *Store) Behind(ctx context.Context, deadLetter uuid.UUID) (first []driver.Behind, n int, err error) {
	if s.table == nil {
		return nil, 0, nil
	}
	waiting := s.table.names.waiting
	ofKey := `class IS NULL AND key = (SELECT key FROM ` + waiting + ` WHERE consumer = $1 AND message_id = $3 AND class IS NOT NULL)`
	err = pgcall.Twice(ctx, s.table.pool, countTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		rows, _ := conn.Query(ctx, `SELECT envelope, stored_at FROM `+waiting+` WHERE consumer = $1 AND `+ofKey+` ORDER BY seq LIMIT $2`,
			s.consumer, behindListed, uuidOf(deadLetter)) // CollectRows returns its error
		first, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (b driver.Behind, err error) {
			var envelope []byte
			if err := row.Scan(&envelope, &b.ParkedAt); err != nil {
				return b, err
			}
			dead, err := letterOf(envelope, nil)
			b.Message = dead.Message
			return b, err
		})
		return err
	})
	if err != nil {
		return nil, 0, fmt.Errorf("inboxpgx: behind: %w", s.table.missing.Explain(err))
	}
	if len(first) < behindListed {
		return first, len(first), nil
	}
	n, err = s.table.counted(ctx, "behind", waiting, ofKey, s.consumer, uuidOf(deadLetter))
	return first, n, err
}

// Processed implements driver.Entries.
func (t *table) Processed(ctx context.Context, consumer string, d time.Duration) (int, error) {
	return t.counted(ctx, "processed", t.names.entries, `processed_at > now() - $3::interval`, consumer, d)
}

// Look implements driver.Entries.
func (t *table) Look(ctx context.Context, consumer string, id uuid.UUID) (driver.Known, error) {
	sql := `SELECT (SELECT processed_at FROM ` + t.names.entries + ` WHERE consumer = $1 AND message_id = $2), w.stored_at,
		(SELECT l.message_id FROM ` + t.names.waiting + ` AS l WHERE l.consumer = $1 AND l.key = w.key AND l.class IS NOT NULL)
		FROM (SELECT) AS one LEFT JOIN ` + t.names.waiting + ` AS w ON w.consumer = $1 AND w.message_id = $2`
	var processed, parked pgtype.Timestamptz
	var stoppedBy pgtype.UUID
	err := pgcall.Twice(ctx, t.pool, countTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, sql, consumer, uuidOf(id)).Scan(&processed, &parked, &stoppedBy)
	})
	if err != nil {
		return driver.Known{}, fmt.Errorf("inboxpgx: look at a message: %w", t.missing.Explain(err))
	}
	return driver.Known{ProcessedAt: processed.Time, ParkedAt: parked.Time, StoppedBy: stoppedBy.Bytes}, nil
}

func (t *table) counted(ctx context.Context, what, table, where, consumer string, arg any) (n int, err error) {
	err = pgcall.Twice(ctx, t.pool, countTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT count(*) FROM (SELECT FROM `+table+` WHERE consumer = $1 AND `+where+` LIMIT $2) AS counted`, consumer, countLimit, arg).Scan(&n)
	})
	if err != nil {
		return 0, fmt.Errorf("inboxpgx: %s: %w", what, t.missing.Explain(err))
	}
	return n, nil
}
