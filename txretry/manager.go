package txretry

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/backoff"
	base "github.com/holdfast-go/holdfast/internal/telemetry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// Transactor runs functions in retried transactions. [*Manager] and the fake
// txretrytest.Manager implement it; the suite in txretrytest/conformance tests
// what they promise.
type Transactor interface {
	// Do runs fn in a transaction and commits it; see [Manager.Do].
	Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error

	// DoWith is Do with settings for this call.
	DoWith(ctx context.Context, opts Options, fn func(ctx context.Context, tx pgx.Tx) error) error
}

// Manager runs transactions on a pool and retries them as a whole. It is safe
// for concurrent use.
type Manager struct {
	source       driver.Source
	cfg          Config
	bounds       bounds
	policy       backoff.Policy
	policyInTurn backoff.Policy
	begin        beginCache
	turns        turns
	telemetry    telemetry
	lostBegin    base.Seldom
	lostReply    base.Seldom
	marker       any // context key of a running fn
}

// New returns a Manager that runs its transactions on pool. A pool whose Config
// went through [PreparePool] gets over lost connections sooner. The error names
// every field of cfg that is wrong.
func New(pool *pgxpool.Pool, cfg Config) (*Manager, error) {
	if pool == nil {
		return nil, errors.New("txretry: pool is nil")
	}
	return NewOver(poolSource{pool}, cfg)
}

// NewOver returns a Manager over another source of transactions than a pool, as sql.OpenDB does:
// one that hands out its own connections, or the memory of txretrytest.
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
	return &Manager{
		source:       source,
		cfg:          cfg,
		bounds:       defaultBounds,
		policy:       cfg.policy(),
		policyInTurn: cfg.inTurn(),
		telemetry:    tel,
		marker:       running{source},
	}, nil
}

// Pool returns the pool given to New, or that of a source which is a driver.Pooler; nil if there is
// none, as on a fake.
func (m *Manager) Pool() *pgxpool.Pool {
	if p, ok := m.source.(driver.Pooler); ok {
		return p.Pool()
	}
	return nil
}

// Do begins a transaction, runs fn in it and commits if fn returns nil; else it
// rolls back, as it does when fn panics or exits its goroutine.
//
// A failure with SQLSTATE 40001, 40P01 or 55P03, in fn or in COMMIT, makes a
// new attempt: fn runs again, in a new transaction, after a delay in which no
// connection is held. So fn must have no effects but through tx and
// [AfterCommit], and must reset what it captured. Any other error of fn comes
// back at once, as it is.
//
// Do returns nil exactly if the transaction has committed. Beside the errors of
// fn and of the database it returns *[LockTimeoutError] (attempts or time used up),
// *[UnavailableError] (connection lost or silent, server out of order),
// *[CommitUnknownError] (connection lost during COMMIT, and nobody knows what became
// of it), [ErrNested], [ErrStandby], and an error wrapping pgx.ErrTxCommitRollback if
// fn returned nil although one of its statements failed.
//
// ctx interrupts everything but COMMIT and ROLLBACK. Without it, too, no wait for
// the server is endless: see [Config]. tx serves one goroutine and is closed
// (pgx.ErrTxClosed) when fn returns.
func (m *Manager) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return m.DoWith(ctx, Options{}, fn)
}

// DoWith is Do with settings for this call.
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

// observe runs a call and reports it, also when fn panics.
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

// inTurn runs a call when its turn within its serial key has come.
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

// DoValue is Do for an fn that returns a value. On error the value is zero.
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
