package txretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// errNoReturn is the error in the span of a call whose fn panicked or exited its goroutine, so that Do did not
// return.
var errNoReturn = errors.New("txretry: fn did not return")

// The phases of an attempt in order, as named in Attempt.Phase.
const (
	phaseAcquire = "acquire"
	phaseBegin   = "begin"
	phaseFn      = "fn"
	phaseCommit  = "commit"
)

// phases is the time spent in each part of a call, over all its attempts.
type phases struct {
	queue   time.Duration // waiting for the turn of a serial key
	acquire time.Duration // waiting for a connection
	begin   time.Duration
	fn      time.Duration
	commit  time.Duration
	resolve time.Duration // finding the outcome of a COMMIT
	sleep   time.Duration // between attempts, including their rollbacks
}

// each calls f for each phase that took time.
func (p *phases) each(f func(phase string, spent time.Duration)) {
	for _, part := range [...]struct {
		name  string
		spent time.Duration
	}{
		{"queue", p.queue},
		{phaseAcquire, p.acquire},
		{phaseBegin, p.begin},
		{phaseFn, p.fn},
		{phaseCommit, p.commit},
		{"resolve", p.resolve},
		{"sleep", p.sleep},
	} {
		if part.spent > 0 {
			f(part.name, part.spent)
		}
	}
}

// call is one call of Do.
type call struct {
	m    *Manager
	opts Options
	fn   func(ctx context.Context, tx pgx.Tx) error

	attempts int       // started so far
	failed   []Attempt // failed attempts that may be retried
	outcome  driver.Outcome
	refused  bool         // by the retry budget
	last     *transaction // of the last run of fn
	first    transaction  // of the first attempt

	phases phases
	mark   time.Time // start of the current phase
}

// lap adds the time since the last lap to a phase.
func (c *call) lap(phase *time.Duration) {
	now := time.Now()
	*phase += now.Sub(c.mark)
	c.mark = now
}

// run makes attempts until one succeeds, one fails permanently, or none is left. It makes none if the retry budget
// refuses the call.
func (c *call) run(ctx context.Context) error {
	if !c.m.budget.enter() {
		c.refused = true
		return &LockTimeoutError{Name: c.opts.Name, cause: errOverBudget, retryAfter: c.m.retryAfter()}
	}
	defer c.m.budget.leave()
	for {
		c.attempts++
		start := time.Now()
		res := c.traced(ctx, c.attempt)
		if res.lost != nil {
			res = c.resolve(ctx, res, start)
		}
		if res.phase != phaseAcquire {
			c.m.budget.count(res.again && isLockFailure(res.sqlstate))
		}
		switch {
		case res.err == nil:
			return nil
		case !res.again:
			return c.final(ctx, res)
		}
		c.failed = append(c.failed, Attempt{res.sqlstate, res.phase, time.Since(start), res.err})
		if err := c.pause(ctx); err != nil {
			return err
		}
	}
}

// traced makes an attempt in a separate span.
func (c *call) traced(ctx context.Context, attempt func(ctx context.Context) result) (res result) {
	ctx, span := c.m.telemetry.startAttempt(ctx, c.attempts)
	returned := false
	defer func() { endAttempt(span, returned, &res) }()
	res = attempt(ctx)
	returned = true
	return res
}

// result is the result of one attempt.
type result struct {
	err      error  // nil: committed
	phase    string // where err occurred
	again    bool   // a new attempt may succeed
	sqlstate string // the reason for the new attempt, if the server returned one

	outOfOrder bool // the database could not do its work

	lost error  // COMMIT was sent, and this error came instead of a reply
	xid  string // the transaction with the unknown outcome
}

// failedIn returns the result for an error in a phase.
func (c *call) failedIn(phase string, err error) result {
	sqlstate := c.opts.transient(err)
	return result{err: err, phase: phase, again: sqlstate != "", sqlstate: sqlstate}
}

// attempt runs fn in one new transaction. However fn ends, also by panic or runtime.Goexit, the transaction is ended
// and the connection released.
func (c *call) attempt(ctx context.Context) result {
	s, tag, failed := c.open(ctx)
	if s == nil {
		return failed
	}
	t := c.transaction(ctx, s)
	defer c.release(ctx, t)
	if s.State() == driver.Idle { // AtBegin was a COMMIT or ROLLBACK
		c.outcome = driver.Unknown
		return result{err: because("AtBegin ended the transaction", ErrManaged, nil), phase: phaseBegin}
	}
	c.last = t
	if c.opts.AtBegin.Done != nil {
		c.opts.AtBegin.Done(tag)
	}
	if res := c.work(t); res.err != nil {
		return res
	}
	defer c.lap(&c.phases.commit)
	return c.commit(t)
}

// maxBegins is the maximum number of BEGINs per attempt.
const maxBegins = 3

// open begins a transaction, or returns a nil session and the failure. BEGIN has no effect, so if its connection was
// lost, open sends it again on another connection, with twice the time limit. This does not count as an attempt.
//
// With AtBegin, the reply to BEGIN comes only after that statement. From the second BEGIN on, its time limit is that
// of a normal statement. Otherwise a statement that waits for a lock would never succeed.
func (c *call) open(ctx context.Context) (driver.Session, pgconn.CommandTag, result) {
	limits, start := c.limits(), time.Now()
	for n := 1; ; n++ {
		s, tag, failed := c.begin(ctx, limits)
		limits.Acquire = c.m.bounds.acquire - time.Since(start)
		if s != nil || n == maxBegins || limits.Acquire <= 0 || !errors.Is(failed.err, driver.ErrNotBegun) {
			return s, tag, failed
		}
		limits.Begin *= 2
		if limits.First = limits.Statement; limits.First > 0 {
			limits.First = max(limits.First, limits.Begin)
		}
		c.logLost(ctx, failed.err)
	}
}

func (c *call) logLost(ctx context.Context, err error) {
	if skipped, ok := c.m.lostBegin.Due(); ok {
		c.m.cfg.Logger.WarnContext(ctx, "txretry: connection lost during BEGIN; using another",
			slog.String("name", c.opts.Name), slog.Any("error", err), slog.Int("repeats", skipped))
	}
}

func (c *call) limits() driver.Limits {
	begin := c.m.bounds.begin
	return driver.Limits{Acquire: c.m.bounds.acquire, Begin: begin, First: begin, Statement: c.opts.patience()}
}

// begin sends BEGIN once. If it fails or panics, it releases the connection.
func (c *call) begin(ctx context.Context, limits driver.Limits) (begun driver.Session, tag pgconn.CommandTag, failed result) {
	s, err := c.m.source.Acquire(ctx, limits)
	c.lap(&c.phases.acquire)
	if err != nil {
		err = fmt.Errorf("txretry: acquire a connection: %w", err)
		return nil, tag, result{err: err, phase: phaseAcquire, outOfOrder: ctx.Err() == nil}
	}
	defer func() {
		if begun == nil {
			c.end(ctx, s, false)
		}
	}()
	tag, err = s.Begin(ctx, c.spec(), c.opts.first())
	c.lap(&c.phases.begin)
	if err != nil {
		failed = c.failedIn(phaseBegin, fmt.Errorf("txretry: begin: %w", onStandby(s, err)))
		failed.outOfOrder = s.State() == driver.Lost && ctx.Err() == nil
		return nil, tag, failed
	}
	return s, tag, result{}
}

// maxBeginCache limits the memory used for callers that compute their timeouts.
const maxBeginCache = 64

// beginKey has the Options that determine the begin message.
type beginKey struct {
	isolation          pgx.TxIsoLevel
	readOnly, wantsXID bool

	lockTimeout, statementTimeout, idleTimeout time.Duration
}

// spec returns the begin message of a call.
func (c *call) spec() *driver.Spec { return c.m.begin.spec(c.beginKey()) }

func (c *call) beginKey() beginKey {
	o := &c.opts
	wantsXID := c.m.cfg.XactStatus && o.Witness == nil && !o.ReadOnly
	return beginKey{o.Isolation, o.ReadOnly, wantsXID, o.LockTimeout, o.StatementTimeout, o.IdleTimeout}
}

// beginCache caches the begin messages.
type beginCache struct {
	mu    sync.RWMutex
	specs map[beginKey]*driver.Spec
}

func (c *beginCache) spec(key beginKey) *driver.Spec {
	c.mu.RLock()
	spec, ok := c.specs[key]
	c.mu.RUnlock()
	if ok {
		return spec
	}
	spec = key.spec()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.specs) < maxBeginCache {
		if c.specs == nil {
			c.specs = make(map[beginKey]*driver.Spec)
		}
		c.specs[key] = spec
	}
	return spec
}

// spec returns the begin message. Its settings are part of one message, so they cost no extra round trip. All parts
// are validated: no user text gets into it.
func (k beginKey) spec() *driver.Spec {
	begin := "begin isolation level " + string(k.isolation)
	if k.readOnly {
		begin += " read only"
	}
	parts := []string{begin}
	parts = appendTimeout(parts, "lock_timeout", k.lockTimeout)
	parts = appendTimeout(parts, "statement_timeout", k.statementTimeout)
	parts = appendTimeout(parts, "idle_in_transaction_session_timeout", k.idleTimeout)
	if k.wantsXID {
		parts = append(parts, "select pg_current_xact_id()")
	}
	return &driver.Spec{SQL: strings.Join(parts, "; "), Parts: parts, ReadOnly: k.readOnly, WantsXID: k.wantsXID}
}

func appendTimeout(parts []string, name string, d time.Duration) []string {
	if d <= 0 {
		return parts
	}
	ms := (d + time.Millisecond - 1) / time.Millisecond
	return append(parts, "set local "+name+" = '"+strconv.FormatInt(int64(ms), 10)+"ms'")
}

// transaction returns the state for a new attempt. Only the first state is stored in the call itself, because handles
// of earlier attempts must stay stale.
func (c *call) transaction(ctx context.Context, s driver.Session) *transaction {
	t := &c.first
	if c.attempts > 1 {
		t = new(transaction)
	}
	t.open(ctx, c.m, s, c.opts.Isolation, c.opts.ReadOnly)
	return t
}

// work runs fn. It returns the error of fn, or the reason why the transaction cannot commit.
func (c *call) work(t *transaction) result {
	err := c.fn(&t.ctx, &t.root)
	t.close()
	c.lap(&c.phases.fn)
	switch {
	case t.session.State() == driver.Idle:
		c.outcome = driver.Unknown
		return result{err: endedByFn(err), phase: phaseFn}
	case err != nil:
		return c.failedFn(t, err)
	}
	if err := committable(t); err != nil {
		res := c.failedIn(phaseCommit, err)
		res.outOfOrder = t.lost()
		return res
	}
	return result{}
}

// failedFn returns the result for an error of fn. If the error does not contain the server's error, the server's
// error decides.
func (c *call) failedFn(t *transaction, err error) result {
	res := c.failedIn(phaseFn, onStandby(t.session, err))
	if res.again || !isMute(err) {
		return res
	}
	if t.failure == nil { // a statement that did not run on the handle
		res.outOfOrder = t.lost() && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
		return res
	}
	server := c.failedIn(phaseFn, t.failure)
	server.outOfOrder = t.lost() || c.outOfOrder(t.failure)
	if !server.again && !server.outOfOrder {
		return res
	}
	if server.err = err; !errors.Is(err, t.failure) {
		server.err = fmt.Errorf("%w: %w", err, t.failure)
	}
	return server
}

// endedByFn returns the error for an fn that ran a COMMIT or ROLLBACK as a statement. Only fn knows which, so the
// call is not retried.
func endedByFn(err error) error {
	return because("fn ended the transaction by a statement of its own", ErrManaged, err)
}

// onStandby adds ErrStandby if a statement failed because the server is a hot standby.
func onStandby(s driver.Session, err error) error {
	if code := sqlstate.Of(err); (code == "25006" || code == "0A000") && s.Standby() {
		return fmt.Errorf("%w: %w", ErrStandby, err)
	}
	return err
}

// committable returns the reason why COMMIT cannot succeed. COMMIT is then not sent, so the transaction is definitely
// rolled back.
func committable(t *transaction) error {
	switch t.session.State() {
	case driver.Failed:
		return because("rolled back: a statement failed and fn returned nil", pgx.ErrTxCommitRollback, onStandby(t.session, t.failure))
	case driver.Lost:
		return because("rolled back: connection lost before COMMIT", pgx.ErrTxCommitRollback, t.failure)
	case driver.Busy:
		return because("rolled back: fn returned with the rows of a query still open", pgx.ErrTxCommitRollback, nil)
	}
	if t.broken != nil {
		return because("rolled back", pgx.ErrTxCommitRollback, t.broken)
	}
	if t.ctx.Err() != nil {
		return because("rolled back: context ended before COMMIT", ended(&t.ctx), nil)
	}
	return nil
}

func because(text string, err, cause error) error {
	if cause == nil {
		return fmt.Errorf("txretry: %s: %w", text, err)
	}
	return fmt.Errorf("txretry: %s: %w: %w", text, err, cause)
}

// commit sends COMMIT.
func (c *call) commit(t *transaction) result {
	c.outcome = driver.Unknown // until Commit returns: a tracer may panic
	outcome, err := t.session.Commit((*detached)(&t.ctx), c.opts.CommitTimeout, t.pending.atCommit())
	switch outcome {
	case driver.Committed:
		c.outcome, t.committed = driver.Committed, true
		return result{}
	case driver.RolledBack:
		c.outcome = driver.RolledBack
		res := c.failedIn(phaseCommit, err)
		res.again = res.again || errors.Is(err, driver.ErrNotSent)
		return res
	}
	if c.opts.ReadOnly { // it has no effects, so its outcome does not matter
		c.outcome = driver.RolledBack
		err = fmt.Errorf("txretry: COMMIT of a read-only transaction was not answered: %w", err)
		return result{err: err, phase: phaseCommit, again: true}
	}
	return result{err: &CommitUnknownError{Name: c.opts.Name, Err: err}, phase: phaseCommit, lost: err, xid: t.session.XID()}
}

// release rolls back an open transaction and releases the connection.
func (c *call) release(ctx context.Context, t *transaction) {
	if c.last == t && !t.done.Load() && t.session.State() == driver.Idle {
		c.outcome = driver.Unknown // fn ended the transaction by a statement, then panicked
	}
	t.done.Store(true)
	c.end(ctx, t.session, t.committed)
}

// end rolls back an open transaction and releases the connection.
func (c *call) end(ctx context.Context, s driver.Session, committed bool) {
	defer s.Close()
	if committed {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.m.bounds.rollback)
	defer cancel()
	if err := s.Rollback(ctx); err != nil {
		c.m.cfg.Logger.DebugContext(ctx, "txretry: rollback failed; connection closed",
			slog.String("name", c.opts.Name), slog.Any("error", err))
	}
}

// resolve finds the outcome of an unanswered COMMIT, if the call has a Witness or an xid, and replaces its result.
// Committed is success; rolled back is retried like a transient failure. The attempt started at begun or later.
func (c *call) resolve(ctx context.Context, unknown result, begun time.Time) result {
	if c.opts.Witness == nil && unknown.xid == "" {
		return unknown
	}
	defer c.lap(&c.phases.resolve)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.m.bounds.resolve)
	defer cancel()
	outcome, err := c.poll(ctx, unknown.xid, begun)
	if skipped, ok := c.m.lostReply.Due(); ok {
		c.m.cfg.Logger.WarnContext(ctx, "txretry: COMMIT was not answered", slog.String("name", c.opts.Name),
			slog.Any("found", outcome), slog.Any("error", err), slog.Int("repeats", skipped))
	}
	switch outcome {
	case driver.Committed:
		c.outcome = driver.Committed
		return result{}
	case driver.RolledBack:
		c.outcome = driver.RolledBack
		return result{err: fmt.Errorf("txretry: COMMIT was not answered and is rolled back: %w", unknown.lost), phase: phaseCommit, again: true}
	}
	// Only the text of err is included, because it is not the error of the call itself.
	unknown.err = &CommitUnknownError{Name: c.opts.Name, Err: fmt.Errorf("%w (not resolved: %v)", unknown.lost, err)}
	return unknown
}

var errStillOpen = errors.New("transaction still open at the time limit")

// poll asks until the outcome is definite, cannot be found, or ctx ends. With Unknown, the error is not nil.
func (c *call) poll(ctx context.Context, xid string, begun time.Time) (driver.Outcome, error) {
	pauses := backoff.Policy{Base: 5 * time.Millisecond, Max: 250 * time.Millisecond, Jitter: 0.5}
	for n := 0; ; n++ {
		outcome, err := c.ask(ctx, xid, begun)
		if err == nil && outcome != driver.Unknown {
			return outcome, nil
		}
		if errors.Is(err, driver.ErrForgotten) {
			return driver.Unknown, err
		}
		if sleep(ctx, pauses.Delay(n, c.m.cfg.Rand())) != nil {
			if err == nil {
				err = errStillOpen
			}
			return driver.Unknown, err
		}
	}
}

func (c *call) ask(ctx context.Context, xid string, begun time.Time) (driver.Outcome, error) {
	if c.opts.Witness != nil {
		return c.askWitness(ctx)
	}
	return c.m.source.Fate(ctx, c.limits(), xid, begun)
}

// askWitness runs Options.Witness in a transaction that is rolled back.
func (c *call) askWitness(ctx context.Context) (driver.Outcome, error) {
	s, err := c.m.source.Acquire(ctx, c.limits())
	if err != nil {
		return driver.Unknown, err
	}
	t := new(transaction)
	t.open(ctx, c.m, s, pgx.ReadCommitted, false)
	defer c.release(ctx, t)
	spec := *c.m.begin.spec(beginKey{isolation: pgx.ReadCommitted, lockTimeout: c.opts.LockTimeout, idleTimeout: c.opts.IdleTimeout})
	spec.Aside = true
	if _, err := s.Begin(ctx, &spec, nil); err != nil {
		return driver.Unknown, err
	}
	committed, err := c.opts.Witness(&t.ctx, &t.root)
	t.close()
	switch {
	case err != nil:
		return driver.Unknown, err
	case committed:
		return driver.Committed, nil
	}
	return driver.RolledBack, nil
}

// final returns the error of the last attempt.
func (c *call) final(ctx context.Context, res result) error {
	before := res.phase == phaseAcquire || res.phase == phaseBegin
	switch {
	case before && len(c.failed) == 0 && ctx.Err() != nil:
		return withCause(ctx, res.err)
	case before && len(c.failed) > 0 && ctx.Err() != nil:
		return c.interrupted(ctx)
	}
	return c.explain(res)
}

// pause waits before the next attempt, or returns the final error if no attempt is left.
func (c *call) pause(ctx context.Context) error {
	defer c.lap(&c.phases.sleep)
	n := len(c.failed)
	if n >= c.opts.MaxAttempts {
		return c.giveUp(nil)
	}
	if ctx.Err() != nil {
		return c.interrupted(ctx)
	}
	policy := &c.m.policy
	if c.opts.SerialKey != "" {
		policy = &c.m.policyInTurn
	}
	delay := policy.Delay(n, c.m.cfg.Rand())
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= delay {
		return c.giveUp(context.DeadlineExceeded)
	}
	c.announce(ctx, delay)
	c.m.budget.leave()
	failed := sleep(ctx, delay)
	c.m.budget.rejoin()
	if failed != nil {
		return c.interrupted(ctx)
	}
	return nil
}

func (c *call) announce(ctx context.Context, delay time.Duration) {
	n := len(c.failed)
	last := c.failed[n-1]
	c.m.cfg.Logger.DebugContext(ctx, "txretry: retrying transaction",
		slog.String("name", c.opts.Name), slog.Int("attempt", n), slog.String("phase", last.Phase),
		slog.String("sqlstate", last.SQLSTATE), slog.Duration("delay", delay))
}

// giveUp returns the error when no attempt is left, or when cause forbids the next one. Only lock failures become a
// LockTimeoutError.
func (c *call) giveUp(cause error) error {
	last := c.failed[len(c.failed)-1]
	if isLockFailure(last.SQLSTATE) {
		return &LockTimeoutError{Name: c.opts.Name, Attempts: c.failed, cause: cause, retryAfter: c.m.retryAfter()}
	}
	res := result{err: last.Err, phase: last.Phase, outOfOrder: last.SQLSTATE == ""}
	if cause != nil {
		res.err = fmt.Errorf("txretry: %sgiven up after %d attempts: %w: %w", prefix(c.opts.Name), len(c.failed), cause, last.Err)
	}
	return c.explain(res)
}

// interrupted returns an error that joins the end of the context with the last failure, so that neither hides the
// other.
func (c *call) interrupted(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return c.giveUp(ended(ctx))
	}
	last := c.failed[len(c.failed)-1].Err
	return fmt.Errorf("txretry: %sinterrupted after %d attempts: %w: %w", prefix(c.opts.Name), len(c.failed), ended(ctx), last)
}

// sleep waits for d. It returns ctx's error if ctx ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
