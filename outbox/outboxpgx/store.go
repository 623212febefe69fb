package outboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgnotify"
	"github.com/holdfast-go/holdfast/internal/pgpause"
	"github.com/holdfast-go/holdfast/internal/pgprune"
	"github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// ErrIgnored is inside every error about a change of the Store's tables that Postgres accepted and did not make: a
// trigger, a rule or row-level security dropped it. Check names the cause.
var ErrIgnored = pgcall.ErrIgnored

const (
	lockNotAvailable = "55P03"
	uniqueViolation  = "23505"
	queryCanceled    = "57014"
)

// Config tunes a Store. The zero value works. All Stores of one outbox must agree on Schema and Table.
type Config struct {
	// Schema holds the tables. Default: the search path decides.
	Schema string
	// Table is the name of the messages table, at most 40 characters. The other tables have this name with a
	// suffix: _lanes, _dead, _audit, _pause and _dedup. Default: holdfast_outbox.
	Table string
	// MaxBodyBytes is the largest body that Write accepts, in bytes. Default: 1 MiB.
	MaxBodyBytes int
	// DedupRetention is how long WriteOnce remembers a key, at least 1 ms. Default: 24 h.
	DedupRetention time.Duration
	// Retention is how long published messages are kept, with published_at. All Stores that relay or prune must
	// use the same value. Default: messages are deleted when they are confirmed, and earlier kept messages are
	// pruned.
	Retention time.Duration
	// PruneInterval is the pause between two rounds in which a relay on this Store deletes rows older than
	// DedupRetention and Retention, and audit entries older than a year. Negative: it deletes nothing; call
	// Prune. Default: 1 minute.
	PruneInterval time.Duration
	// PollOnly turns off wake-ups between processes: the Store neither notifies relays of other processes of
	// commits nor listens. Relays then find messages of other processes when they poll. Default: both are on.
	PollOnly bool
	// Logger receives one line for each outage of wake-ups and each failed round of pruning, and occasional
	// warnings about rows that cannot be changed. Default: slog.Default().
	Logger *slog.Logger
}

// Store is an outbox in Postgres: writers write to it in their own transactions, relays read from it. It is safe for
// concurrent use, by any number of relays in any number of processes. Use one Store per process and table, because
// two Stores of one table do not wake each other's relays directly.
type Store struct {
	pool     *pgxpool.Pool
	renewals *pgcall.Reserve
	cfg      Config
	t        tables
	sql      statements
	set      migrate.Set
	schema   fs.FS

	lanesPerClaim int
	maxBatchBytes int64
	horizon       horizon
	nextDue       nextDue
	lost          lostClaims
	slow          slowClaims
	refusals      refusals
	refusedDue    refusedDue
	hidden        hidden

	pruner      *pgprune.Pruner
	relays      relays
	afterCommit func() // Wake, as a stored method value
	sender      *pgnotify.Sender
	listener    *pgnotify.Listener

	dead       *deadLetters
	parked     parked
	complaints telemetry.SeldomEach
}

const (
	// defaultLanesPerClaim leaves lanes for other relays, and is enough to fill a batch.
	defaultLanesPerClaim = 4
	// defaultMaxBatchBytes limits the bodies of one batch; its first message is always included.
	defaultMaxBatchBytes = 32 << 20
)

// New returns a Store on the pool; it makes no server call. It returns an error for an invalid cfg.
//
// A relay uses at most six connections of the pool: three for batches and, for moments, one each for pruning, the
// gauges and the test of LISTEN. With fewer it is slower; one is enough. It has two more in addition to the pool's
// maximum: one that listens, unless PollOnly is set, and one that renews the leases of a long batch. The listening
// connection must reach Postgres itself or a pooler in session mode. Everything else also works through a pooler in
// transaction mode.
func New(pool *pgxpool.Pool, cfg Config) (*Store, error) {
	cfg.Table = cmp.Or(cfg.Table, defaultTable)
	cfg.DedupRetention = cmp.Or(cfg.DedupRetention, defaultDedupRetention)
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	t, err := tablesOf(cfg.Schema, cfg.Table)
	if err := errors.Join(err, cfg.validate(pool)); err != nil {
		return nil, err
	}
	set, schema, err := migrations(cfg.Schema, cfg.Table)
	if err != nil {
		return nil, err
	}
	s := &Store{
		pool: pool, renewals: pgcall.NewReserve(pool), cfg: cfg, t: t, sql: t.statements(), set: set, schema: schema,
		lanesPerClaim: defaultLanesPerClaim, maxBatchBytes: defaultMaxBatchBytes,
	}
	s.dead = newDeadLetters(pool, t, s.Wake)
	s.parked = newParked(s.dead, &s.nextDue)
	if s.pruner, err = s.newPruner(); err != nil {
		return nil, err
	}
	s.afterCommit = s.Wake
	s.connect()
	return s, nil
}

const defaultDedupRetention = 24 * time.Hour

func (c Config) validate(pool *pgxpool.Pool) error {
	var errs []error
	if pool == nil {
		errs = append(errs, errors.New("outboxpgx: New needs a pool"))
	}
	if c.MaxBodyBytes < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: Config.MaxBodyBytes is %d, want 0 or more", c.MaxBodyBytes))
	}
	if c.DedupRetention < time.Millisecond {
		errs = append(errs, fmt.Errorf("outboxpgx: Config.DedupRetention is %v, want at least 1 ms", c.DedupRetention))
	}
	if c.Retention < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: Config.Retention is %v, want 0 or more", c.Retention))
	}
	return errors.Join(errs...)
}

// callTimeout is the time limit of calls whose context has no deadline. Calls of a relay have one.
const callTimeout = 30 * time.Second

// use runs fn on a connection.
func (s *Store) use(ctx context.Context, fn func(context.Context, *pgxpool.Conn) error) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, callTimeout)
		defer cancel()
	}
	return pgcall.Use(ctx, s.pool, fn)
}

// send runs a batch in one round trip.
func (s *Store) send(ctx context.Context, queue *pgx.Batch) error {
	return s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error { return conn.SendBatch(ctx, queue).Close() })
}

// Name implements driver.Named. It returns Config.Table, with Config.Schema and a dot in front if that is set.
func (s *Store) Name() string {
	if s.cfg.Schema == "" {
		return s.cfg.Table
	}
	return s.cfg.Schema + "." + s.cfg.Table
}

// Depth implements driver.Measured. The oldest age comes from the first stored message of each lane and from the
// counted waiting messages. Messages below a wrong floor are missing until a claim has corrected the floor. Stored is
// set only for roles that may read the table's sequence. With 100,000 messages or more of a kind, the query takes
// about 0.3 s of the database: call it every few seconds at most.
func (s *Store) Depth(ctx context.Context) (driver.Depth, error) {
	var stats driver.Depth
	var oldest *int64
	queue := &pgx.Batch{}
	queue.Queue(beginSQL)
	queue.Queue(settingsSQL)
	queue.Queue(s.t.fill(statsSQL), driver.StatsLimit).QueryRow(func(row pgx.Row) error {
		return row.Scan(&stats.Ready, &stats.Parked, &stats.Dead, &oldest, &stats.Leased, &stats.Doubtful, &stats.Stored)
	})
	queue.Queue(commitSQL)
	if err := s.send(ctx, queue); err != nil {
		return driver.Depth{}, fmt.Errorf("outboxpgx: stats: %w", s.t.explain(err))
	}
	if oldest != nil {
		stats.OldestAge = max(0, time.Duration(*oldest)*time.Microsecond)
	}
	return stats, nil
}

// Pause implements driver.Pausable.
func (s *Store) Pause(ctx context.Context, by, reason string) error {
	return s.pauseError("pause", s.pause().Set(ctx, by, reason))
}

// Resume implements driver.Pausable. It wakes a relay.
func (s *Store) Resume(ctx context.Context) error {
	if err := s.pause().Clear(ctx); err != nil {
		return s.pauseError("resume", err)
	}
	s.Wake()
	return nil
}

// Paused implements driver.Pausable.
func (s *Store) Paused(ctx context.Context) (driver.Pause, error) {
	state, err := s.pause().Get(ctx)
	return state, s.pauseError("paused", err)
}

func (s *Store) pause() pgpause.Switch {
	return pgpause.Switch{Pool: s.pool, Table: s.t.pause, Missing: s.t.missing()}
}

func (s *Store) pauseError(what string, err error) error {
	if err != nil {
		return fmt.Errorf("outboxpgx: %s: %w", what, err)
	}
	return nil
}

// due returns the rows to prune: expired keys of WriteOnce, old audit entries, and published messages. Published
// messages are pruned without a Retention too, because rows may remain from a time with one.
func (t tables) due(retention time.Duration) []pgprune.Statement {
	const published = `published_at IS NOT NULL AND published_at < now() - $1 * interval '1 microsecond' ORDER BY published_at`
	return []pgprune.Statement{
		{Table: t.dedup, ID: "key", Due: `expires_at <= now() ORDER BY expires_at`},
		{Table: t.audit, ID: "id", Due: `at < now() - $1 * interval '1 microsecond' ORDER BY at`, Args: []any{auditRetention.Microseconds()}},
		{Table: t.outbox, ID: "id", Due: published, Args: []any{retention.Microseconds()}},
	}
}

func (s *Store) newPruner() (*pgprune.Pruner, error) {
	return pgprune.New(pgprune.Config{
		Pool: s.pool, Table: s.t.outbox, Core: "outbox", Statements: s.t.due(s.cfg.Retention), Interval: s.cfg.PruneInterval,
		Explain: s.t.explain, Logger: s.cfg.Logger,
	})
}

// Prune deletes published messages older than Config.Retention (all of them if it is 0), expired keys of WriteOnce,
// and audit entries older than a year. It returns the number of deleted rows, also with an error. A relay on the
// Store does the same every Config.PruneInterval. Prune works in small transactions; ctx may end it at any time.
func (s *Store) Prune(ctx context.Context) (int, error) { return s.pruner.Prune(ctx) }

// Prunable returns how many rows Prune would delete now. It counts at most 100,000 of each kind, which means 100,000
// or more.
func (s *Store) Prunable(ctx context.Context) (int, error) { return s.pruner.Count(ctx) }

// PrunePass implements driver.Pruner. It does nothing if Config.PruneInterval is negative.
func (s *Store) PrunePass(ctx context.Context) { s.pruner.Pass(ctx) }

// Every part walks an index from its start and stops at the limit. Of the waiting messages, only failed and held ones
// count for the oldest age. $1 limit.
const statsSQL = `
SELECT
  least($1, waiting.held + (SELECT count(*) FROM (
     SELECT FROM {lanes} l CROSS JOIN LATERAL (
       SELECT FROM {outbox} o WHERE o.lane = l.lane AND o.seq >= l.floor AND o.published_at IS NULL AND o.due_at IS NULL ORDER BY o.seq LIMIT $1::int) r
     LIMIT $1) ready)),
  waiting.parked,
  (SELECT count(*) FROM (SELECT FROM {dead} ORDER BY died_at, seq LIMIT $1) dead),
  (extract(epoch FROM clock_timestamp() - least(waiting.oldest, (SELECT min(r.created_at) FILTER (WHERE isfinite(r.created_at)) FROM {lanes} l CROSS JOIN LATERAL (
     SELECT o.created_at FROM {outbox} o WHERE o.lane = l.lane AND o.seq >= l.floor AND o.published_at IS NULL AND o.due_at IS NULL ORDER BY o.seq LIMIT 1) r))) * 1000000)::bigint,
  lanes.leased, lanes.doubtful, CASE WHEN has_sequence_privilege('{sequence}', 'SELECT') THEN coalesce(pg_sequence_last_value('{sequence}'), 0) ELSE 0 END
FROM (SELECT count(*) FILTER (WHERE held) AS held, count(*) FILTER (WHERE NOT held) AS parked,
             min(created_at) FILTER (WHERE (held OR attempts > 0) AND isfinite(created_at)) AS oldest
      FROM (SELECT held, attempts, created_at FROM {outbox} WHERE published_at IS NULL AND due_at IS NOT NULL ORDER BY due_at LIMIT $1) w) waiting,
     (SELECT count(*) FILTER (WHERE token IS NOT NULL AND lease_until > now()) AS leased,
             count(*) FILTER (WHERE suspect IS NOT NULL OR token IS NOT NULL AND lease_until <= now()) AS doubtful FROM {lanes}) lanes`

// statements has the SQL of writers and relays, with the table names filled in.
type statements struct {
	insertOne, insert                    string
	remember, recall                     string
	claim, read, readRuns, countLosses   string
	lower, writers                       string
	lockDue, holdDue, holdReady, release string
	settle, locked, look, lock, renew    string
	stillReady, due                      string
}

func (t tables) statements() statements {
	parts := strings.NewReplacer("{ready}", ready, "{waiting}", waiting, "{before}", before, "{free}", free, "{heldUntil}", heldUntil,
		"{held}", strings.ReplaceAll(heldSQL, "{heldUntil}", heldUntil),
		"{fits}", strings.ReplaceAll(fits, "{max}", "$4::bigint"), "{record}", recordWith("true"))
	fill := func(sql string) string { return t.fill(parts.Replace(sql)) } // a part may name a table
	due := func(sql, skip, only string) string {
		rows := strings.NewReplacer("{skip}", skip, "{only}", only).Replace(dueRowsSQL)
		return fill(strings.ReplaceAll(sql, "{dueRows}", rows))
	}
	read := func(rows string) string {
		return fill(strings.ReplaceAll(strings.ReplaceAll(readSQL, "{rows}", rows), "{share}", shareSQL))
	}
	return statements{
		insertOne: fill(insertOneSQL), insert: fill(insertSQL),
		remember: fill(rememberSQL), recall: fill(recallSQL),
		claim: fill(claimSQL), read: read(rowsSQL), readRuns: read(runsSQL), countLosses: fill(countLossesSQL),
		lower: fill(lowerSQL), writers: writersSQL,
		lockDue: due(lockDueSQL, "$2", "$3"), due: due(dueSQL, "$2", "$3"),
		holdDue: due(holdDueSQL, "$3", "$4"), holdReady: fill(holdReadySQL), release: due(releaseSQL, "$7", "$8"),
		settle: fill(settleSQL), locked: fill(lockedSQL), look: fill(lookSQL), lock: fill(lockSQL), renew: fill(renewSQL),
		stillReady: fill(stillReadySQL),
	}
}

// A relay's transaction is one round trip at READ COMMITTED. At SERIALIZABLE, relays would abort each other, because
// rows that SKIP LOCKED skips count as read.
const (
	beginSQL      = `BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`
	commitSQL     = `COMMIT`
	commitGoOnSQL = `COMMIT AND CHAIN` // starts another transaction with the same properties
)

// settingsSQL is the first statement of each relay transaction that does not start with a function of the schema. For
// the reasons see migrations/0006_outbox_relay.sql, which uses the same settings.
const settingsSQL = `
SELECT set_config('idle_in_transaction_session_timeout', '5s', true), set_config('plan_cache_mode', 'force_generic_plan', true),
       set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true),
       set_config('enable_mergejoin', 'off', true), set_config('jit', 'off', true)`

// asyncCommitSQL lets a claim commit without waiting for the disk. If a crash of the database undoes a claim, its
// settlement detects this, because no other claim has its token. A settlement waits for the disk, and so makes the
// claim's writes durable too.
const asyncCommitSQL = `SELECT set_config('synchronous_commit', 'off', true)`

// lookTimeoutSQL limits a scan below the floors to a twentieth of the time between two scans.
const lookTimeoutSQL = `SELECT set_config('statement_timeout', '250ms', true)`

// The states of an unpublished row o.
const (
	ready   = `o.published_at IS NULL AND o.due_at IS NULL`
	waiting = `o.published_at IS NULL AND o.due_at IS NOT NULL`
)

// free is NULL for a row o that another session has locked, for a change or for a foreign key. Waiting for such a row
// would delay all others for as long as that session likes. Only a row with an xmax can be locked, and few rows have
// one, so the lock test runs for few rows.
const free = `CASE WHEN o.xmax = 0 THEN true ELSE (SELECT true FROM {outbox} x WHERE x.id = o.id FOR UPDATE SKIP LOCKED) END`

// before finds the nearest waiting row p before o in its key. It does not search for the first one, because the index
// entries of many deleted rows may lie before it. An empty key has no order. o must be unpublished.
const before = `p.ordering_key = o.ordering_key AND o.ordering_key <> '' AND p.seq < o.seq AND p.published_at IS NULL AND p.due_at IS NOT NULL ORDER BY p.seq DESC LIMIT 1`
