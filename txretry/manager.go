package txretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	base "github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// Transactor runs functions in retried transactions. [*Manager] and the fake txretrytest.Manager implement it. The
// suite in internal/txretry/conformance tests both.
type Transactor interface {
	// Do runs fn in a transaction and commits it; see [Manager.Do].
	Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error

	// DoWith is like Do, with settings for this call.
	DoWith(ctx context.Context, opts Options, fn func(ctx context.Context, tx pgx.Tx) error) error
}

// Manager runs functions in transactions on a pool and retries whole transactions. It is safe for concurrent use.
type Manager struct {
	source       driver.Source
	cfg          Config
	bounds       bounds
	policy       backoff.Policy
	policyInTurn backoff.Policy
	begin        beginCache
	turns        turns
	budget       *budget
	telemetry    telemetry
	lostBegin    base.Seldom
	lostReply    base.Seldom
	marker       any // context key of a running fn
}

// New returns a Manager that runs its transactions on pool. A pool whose Config was passed to [PreparePool] recovers
// sooner from lost connections. The error names every invalid field of cfg.
func New(pool *pgxpool.Pool, cfg Config) (*Manager, error) {
	if pool == nil {
		return nil, errors.New("txretry: pool is nil")
	}
	return NewOver(poolSource{pool}, cfg)
}

// NewOver returns a Manager over a source of transactions other than a pool, such as a source with its own
// connections, or the in-memory database of txretrytest.
func NewOver(source driver.Source, cfg Config) (*Manager, error) {
	if source == nil {
		return nil, errors.New("txretry: source is nil")
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	tel, err := newTelemetry(cfg)
	if err != nil {
		return nil, err
	}
	m := &Manager{
		source:       source,
		cfg:          cfg,
		bounds:       defaultBounds,
		policy:       cfg.policy(),
		policyInTurn: cfg.inTurn(),
		budget:       newBudget(cfg.RetryBudget),
		telemetry:    tel,
		marker:       running{source},
	}
	if err := tel.observe(m.budget); err != nil {
		return nil, err
	}
	return m, nil
}

// Pool returns the pool given to New, or the pool of a source that is a driver.Pooler. It is nil if there is none,
// for example on a fake.
func (m *Manager) Pool() *pgxpool.Pool {
	if p, ok := m.source.(driver.Pooler); ok {
		return p.Pool()
	}
	return nil
}

// Do begins a transaction, runs fn in it and commits if fn returns nil. Otherwise it rolls back, also if fn panics or
// exits its goroutine.
//
// After a failure with SQLSTATE 40001, 40P01 or 55P03, in fn or in COMMIT, Do makes a new attempt: fn runs again, in
// a new transaction, after a delay without a connection. fn must therefore have no effects except through tx and
// [AfterCommit], and must reset captured variables. Do returns any other error of fn immediately and unchanged.
//
// Do returns nil exactly if the transaction has committed. Besides the errors of fn and of the database, it returns
// *[LockTimeoutError] (attempts or time used up), *[UnavailableError] (connection lost, server silent or out of
// order), *[CommitUnknownError] (connection lost during COMMIT, outcome unknown), [ErrNested], [ErrStandby], and an
// error wrapping pgx.ErrTxCommitRollback if fn returned nil although one of its statements failed.
//
// ctx interrupts everything except COMMIT and ROLLBACK. Waits for the server also have their own time limits: see
// [Config]. tx is not safe for concurrent use and is closed (pgx.ErrTxClosed) when fn returns.
func (m *Manager) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return m.DoWith(ctx, Options{}, fn)
}

// DoWith is like Do, with settings for this call.
func (m *Manager) DoWith(ctx context.Context, opts Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	if fn == nil {
		return errors.New("txretry: fn is nil")
	}
	if t, ok := ctx.Value(m.marker).(*transaction); ok && !t.done.Load() {
		return m.nested(ctx, t, opts, fn)
	}
	c := &call{m: m, opts: opts.withDefaults(&m.cfg), fn: fn}
	if err := c.opts.validate(); err != nil {
		return err
	}
	defer c.runAfterCommit()
	return m.observe(ctx, c)
}

// observe runs a call and reports it, also if fn panics.
func (m *Manager) observe(ctx context.Context, c *call) (err error) {
	start := time.Now()
	c.mark = start
	ctx, span := m.telemetry.start(ctx, c.opts.Name)
	returned := false
	defer func() {
		result := err
		if !returned {
			result = errNoReturn
		}
		m.telemetry.end(ctx, span, c, time.Since(start), result)
	}()
	err = m.inTurn(ctx, c)
	returned = true
	return err
}

// inTurn runs a call when its turn for its serial key has come.
func (m *Manager) inTurn(ctx context.Context, c *call) error {
	if c.opts.SerialKey == "" {
		return c.run(ctx)
	}
	err := m.turns.take(ctx, c.opts.SerialKey)
	c.lap(&c.phases.queue)
	if err != nil {
		return err
	}
	defer m.turns.pass(c.opts.SerialKey)
	return c.run(ctx)
}

// DoValue is like Do for an fn that returns a value. On error the value is zero.
func DoValue[T any](ctx context.Context, t Transactor, fn func(ctx context.Context, tx pgx.Tx) (T, error)) (T, error) {
	var value, zero T
	if t == nil || fn == nil {
		return zero, errors.New("txretry: DoValue needs a Transactor and an fn")
	}
	err := t.Do(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		value, err = fn(ctx, tx)
		return err
	})
	if err != nil {
		return zero, err
	}
	return value, nil
}

// turns lets the callers of one key run one at a time, first come first served, before any of them takes a
// connection. A hot row then causes a queue instead of many serialization failures. It orders the callers of one
// process only; between processes the database decides.
type turns struct {
	mu      sync.Mutex
	waiting map[string][]chan struct{} // has an entry while the key is held; a closed channel passes the key on
}

// take waits for the turn of a key. The caller must pass the key on. On error it has left the queue because its
// context ended.
func (t *turns) take(ctx context.Context, key string) error {
	own, first := t.enter(key)
	if first {
		return nil
	}
	select {
	case <-own:
		return nil
	case <-ctx.Done():
		if t.leave(key, own) {
			return fmt.Errorf("txretry: waiting for the serial key: %w", ended(ctx))
		}
		return nil // the turn came at that moment
	}
}

func (t *turns) enter(key string) (own chan struct{}, first bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting, taken := t.waiting[key]
	if taken {
		own = make(chan struct{})
		t.waiting[key] = append(waiting, own)
		return own, false
	}
	if t.waiting == nil {
		t.waiting = make(map[string][]chan struct{})
	}
	t.waiting[key] = nil
	return nil, true
}

// leave removes a caller from the queue, and reports whether it was still there.
func (t *turns) leave(key string, own chan struct{}) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := slices.Index(t.waiting[key], own)
	if i >= 0 {
		t.waiting[key] = slices.Delete(t.waiting[key], i, i+1)
	}
	return i >= 0
}

// pass passes the key to the next in the queue, or frees it.
func (t *turns) pass(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	waiting := t.waiting[key]
	if len(waiting) == 0 {
		delete(t.waiting, key)
		return
	}
	t.waiting[key] = waiting[1:]
	close(waiting[0])
}

const (
	// minVersion is the first version with pg_current_xact_id.
	minVersion = 13

	// minPredLocks is enough for 25 predicate locks per transaction. Postgres keeps the locks of up to ten committed
	// transactions per connection while an overlapping transaction is open.
	minPredLocks = 256

	checkTimeout = 5 * time.Second // for each of two tries
)

// Check looks for problems with the server and the pool. The server may be too old, read-only, or have a small table
// of predicate locks. The pool may be larger than the server allows, or have no time limits (see [PreparePool]).
// Check returns nil if it finds none. Otherwise the error joins the findings, each with a method Fix() string that
// returns the fix. An error without this method is a failure of Check itself. For a manager that was not made by
// [New], such as on a fake or over database/sql, Check returns nil.
func (m *Manager) Check(ctx context.Context) error {
	source, ok := m.source.(poolSource)
	if !ok {
		return nil
	}
	var facts serverFacts
	err := pgcall.Twice(ctx, source.pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `select current_setting('server_version_num')::int / 10000,
			current_setting('max_pred_locks_per_transaction')::int,
			current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
			pg_is_in_recovery(), current_setting('default_transaction_read_only')::bool`, pgx.QueryExecModeExec,
		).Scan(&facts.Version, &facts.PredLocks, &facts.Connections, &facts.Standby, &facts.ReadOnly)
	})
	if err != nil {
		return fmt.Errorf("txretry: check: %w", err)
	}
	found := check.Findings{Component: "txretry"}
	m.checkServer(facts, &found)
	checkPool(source.pool.Config(), facts, &found)
	return found.Err()
}

func (m *Manager) checkServer(facts serverFacts, found *check.Findings) {
	if facts.Version < minVersion {
		found.Add(fmt.Sprintf("upgrade to Postgres %d or newer", minVersion), "Postgres %d is too old", facts.Version)
	}
	if facts.Standby {
		found.Add("connect to the primary, for example with target_session_attrs=primary", "the server is a hot standby")
	} else if facts.ReadOnly {
		found.Add("reset default_transaction_read_only of the server, the database or the role",
			"default_transaction_read_only is on, so no transaction can write")
	}
	if m.cfg.Isolation == pgx.Serializable && facts.PredLocks < minPredLocks {
		found.Add(fmt.Sprintf("ALTER SYSTEM SET max_pred_locks_per_transaction = %d, then restart the server", minPredLocks),
			"max_pred_locks_per_transaction is %d: SERIALIZABLE transactions fail with 53200 if one of them is open for long and they take more than %d locks each",
			facts.PredLocks, facts.PredLocks/10)
	}
}

func checkPool(pool *pgxpool.Config, facts serverFacts, found *check.Findings) {
	if int(pool.MaxConns) > facts.Connections {
		found.Add("lower the pool's MaxConns, or raise max_connections",
			"the pool may open %d connections, the server allows %d", pool.MaxConns, facts.Connections)
	}
	if pool.ConnConfig.ConnectTimeout == 0 || pool.PingTimeout == 0 || pool.BeforeClose == nil {
		found.Add("call txretry.PreparePool on the pool's Config",
			"the pool has no time limits to connect, ping and close, so it may need a minute to recover from connections that were cut off")
	}
}

// serverFacts are the settings that Check reads.
type serverFacts struct {
	Version, PredLocks, Connections int
	Standby, ReadOnly               bool
}
