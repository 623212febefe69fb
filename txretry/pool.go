package txretry

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// silence is how long a caller must have waited, before it leaves, to start a test of the idle connections. Without
// the test, the next caller would get the next silent connection.
const silence = 500 * time.Millisecond

// PreparePool sets the time limits that a pool needs to recover from silent connections, such as behind a router that
// has forgotten them. The defaults of pgxpool have no such limits:
//
//   - ConnConfig.ConnectTimeout becomes 5 s if it is 0, which means 2 minutes.
//   - PingTimeout becomes 2 s if it is 0, which means no limit.
//   - BeforeClose first calls the existing BeforeClose. Then it gives a closed connection one second to send its
//     goodbye. pgx waits 15 s, during which the connection occupies its place in the pool and Pool.Close waits.
//
// A [Manager] works on any pool, but without PreparePool it may need 20 s to recover when all connections are lost at
// once. [Manager.Check] reports this.
func PreparePool(cfg *pgxpool.Config) {
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = 5 * time.Second
	}
	if cfg.PingTimeout == 0 {
		cfg.PingTimeout = 2 * time.Second
	}
	before := cfg.BeforeClose
	cfg.BeforeClose = func(conn *pgx.Conn) {
		if before != nil {
			before(conn)
		}
		if pg := conn.PgConn(); pg.IsClosed() {
			pgcall.HangUp(pg)
		}
	}
}

// poolSource provides the connections of a pool.
type poolSource struct{ pool *pgxpool.Pool }

// Pool implements driver.Pooler.
func (p poolSource) Pool() *pgxpool.Pool { return p.pool }

func (p poolSource) Acquire(ctx context.Context, limits driver.Limits) (driver.Session, error) {
	conn, err := p.acquire(ctx, limits)
	if err != nil {
		return nil, err
	}
	s := &pgSession{source: p, pooled: conn, limits: limits}
	s.guard = guard{conn: conn.Conn(), patience: limits.Statement}
	return s, nil
}

// acquire first waits for a short time, because the pool pings a connection that was idle. If the ping gets no reply
// within this time, or the caller leaves, the other idle connections are tested.
func (p poolSource) acquire(ctx context.Context, limits driver.Limits) (*pgxpool.Conn, error) {
	start := time.Now()
	conn, err := p.acquireWithin(ctx, min(limits.Begin, limits.Acquire))
	waited := time.Since(start)
	if err != nil && ctx.Err() != nil && waited >= silence {
		go pgcall.Sweep(p.pool, limits.Begin)
	}
	if left := limits.Acquire - waited; errors.Is(err, errNoConnection) && left > 0 {
		pgcall.Sweep(p.pool, limits.Begin)
		conn, err = p.acquireWithin(ctx, left)
	}
	if errors.Is(err, errNoConnection) {
		stat := p.pool.Stat()
		err = fmt.Errorf("%w within %v: maximum %d, in use %d, being opened or closed %d",
			err, limits.Acquire, stat.MaxConns(), stat.AcquiredConns(), stat.ConstructingConns())
	}
	return conn, err
}

var errNoConnection = errors.New("no connection became free")

func (p poolSource) acquireWithin(ctx context.Context, d time.Duration) (*pgxpool.Conn, error) {
	bounded, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	conn, err := p.pool.Acquire(bounded)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		return nil, errNoConnection
	}
	return conn, err
}

// Fate implements driver.Source.
func (p poolSource) Fate(ctx context.Context, limits driver.Limits, xid string, begun time.Time) (driver.Outcome, error) {
	conn, err := p.acquire(ctx, limits)
	if err != nil {
		return driver.Unknown, err
	}
	g := guard{conn: conn.Conn(), patience: limits.Begin}
	defer func() { pgcall.Put(conn, g.silent) }()
	g.expect(limits.Begin)
	var status *string
	err = g.answered(ctx, g.conn.QueryRow(ctx, driver.AskFate, pgx.QueryExecModeExec, xid, driver.AgeOf(begun)).Scan(&status, nil))
	return driver.FateOf(status, sqlstate.Of(err), err)
}

// pgSession runs one transaction on a pooled connection.
type pgSession struct {
	connTx
	source poolSource
	pooled *pgxpool.Conn
	limits driver.Limits
	begun  bool // BEGIN was answered
	xid    string
}

func (s *pgSession) Begin(ctx context.Context, spec *driver.Spec, first *driver.Statement) (tag pgconn.CommandTag, err error) {
	if first != nil && !spec.WantsXID {
		s.expect(s.limits.First)
		tag, err = s.beginWith(ctx, spec, first)
	} else {
		s.expect(s.limits.Begin)
		if first != nil && first.Look != nil {
			err = first.Look.Read(s.conn.QueryRow(ctx, first.Look.SQL, first.Look.Args...))
		}
		if err == nil {
			err = s.begin(ctx, spec)
		}
		if err == nil && first != nil {
			s.hasBegun()
			tag, err = s.conn.Exec(ctx, first.SQL, first.Args...)
		}
	}
	err = s.answered(ctx, err)
	if err != nil && !s.begun && s.conn.IsClosed() && ctx.Err() == nil {
		err = fmt.Errorf("%w: %w", driver.ErrNotBegun, err)
	}
	return tag, err
}

// hasBegun restarts the time limit for the first statement.
func (s *pgSession) hasBegun() {
	s.begun = true
	s.clear()
	s.expect(s.patience)
}

// beginWith sends everything in one pipeline.
func (s *pgSession) beginWith(ctx context.Context, spec *driver.Spec, first *driver.Statement) (tag pgconn.CommandTag, err error) {
	var batch pgx.Batch
	if first.Look != nil {
		batch.Queue("begin isolation level read committed read only")
		batch.Queue(first.Look.SQL, first.Look.Args...).QueryRow(first.Look.Read)
		batch.Queue("commit")
	}
	begin := batch.Len()
	for _, part := range spec.Parts {
		batch.Queue(part)
	}
	batch.QueuedQueries[begin].Exec(func(pgconn.CommandTag) error {
		s.hasBegun()
		return nil
	})
	batch.Queue(first.SQL, first.Args...).Exec(func(t pgconn.CommandTag) error {
		tag = t
		return nil
	})
	err = s.conn.SendBatch(ctx, &batch).Close()
	return tag, err
}

func (s *pgSession) begin(ctx context.Context, spec *driver.Spec) error {
	if !spec.WantsXID {
		_, err := s.conn.Exec(ctx, spec.SQL)
		return err
	}
	// Conn.Exec of pgx discards the results.
	results, err := s.conn.PgConn().Exec(ctx, spec.SQL).ReadAll()
	if err != nil {
		return err
	}
	if last := results[len(results)-1]; len(last.Rows) == 1 {
		s.xid = string(last.Rows[0][0])
	}
	return nil
}

func (s *pgSession) Tx() pgx.Tx { return &s.connTx }

func (s *pgSession) XID() string { return s.xid }

func (s *pgSession) Standby() bool {
	return s.conn.PgConn().ParameterStatus("in_hot_standby") == "on"
}

func (s *pgSession) State() driver.State {
	if s.conn.IsClosed() {
		return driver.Lost
	}
	if s.conn.PgConn().IsBusy() {
		return driver.Busy
	}
	switch s.conn.PgConn().TxStatus() {
	case 'T':
		return driver.Open
	case 'E':
		return driver.Failed
	}
	return driver.Idle
}

func (s *pgSession) Savepoint(ctx context.Context, id int) error {
	_, err := s.Exec(ctx, "savepoint "+savepointName(id))
	return err
}

func (s *pgSession) Release(ctx context.Context, id int) error {
	_, err := s.Exec(ctx, "release savepoint "+savepointName(id))
	return err
}

// RollbackTo also releases the savepoint. Otherwise every later reader of the rows would have to check its
// subtransaction.
func (s *pgSession) RollbackTo(ctx context.Context, id int) error {
	name := savepointName(id)
	_, err := s.Exec(ctx, "rollback to savepoint "+name+"; release savepoint "+name)
	return err
}

func savepointName(id int) string { return "holdfast_" + strconv.Itoa(id) }

// Commit relies only on the server's reply. Any result other than the tag of COMMIT or ROLLBACK, or an error report
// of the server, leaves the outcome unknown, even if pgconn.SafeToRetry reports that nothing was sent.
func (s *pgSession) Commit(ctx context.Context, timeout time.Duration, last []driver.Statement) (driver.Outcome, error) {
	defer s.clear() // a tracer may panic
	if time.Since(s.since) > maxSilence {
		if err := s.ping(ctx); err != nil {
			return driver.RolledBack, err
		}
	}
	s.expect(timeout)
	tag, err := s.sendCommit(ctx, last)
	err = s.answered(ctx, err)
	switch {
	case tag.String() == "COMMIT":
		return driver.Committed, nil
	case err == nil && tag.String() == "ROLLBACK":
		return driver.RolledBack, pgx.ErrTxCommitRollback
	case err == nil: // an AtCommit consisted of several statements
		return driver.Unknown, fmt.Errorf("the reply to COMMIT is hidden by another statement's reply %q", tag)
	case s.refused(err):
		return driver.RolledBack, err
	}
	return driver.Unknown, err
}

// maxSilence is how long a transaction may send nothing before COMMIT is preceded by a ping. A COMMIT on a lost
// connection would have an unknown outcome. (A pool pings after the same time.)
const maxSilence = time.Second

// ping returns ErrNotSent if the connection is lost. If the server ended it because fn took too long (25P03, 25P04),
// ping returns the server's error.
func (s *pgSession) ping(ctx context.Context) error {
	s.expect(s.limits.Begin)
	err := s.answered(ctx, s.conn.Ping(ctx))
	var answer *pgconn.PgError
	if err == nil || errors.As(err, &answer) && (answer.Code == "25P03" || answer.Code == "25P04") {
		return err
	}
	return fmt.Errorf("%w: %w", driver.ErrNotSent, err)
}

// sendCommit sends COMMIT, alone or at the end of one pipeline. It does not rely on pgx's classification of errors:
// pgx 5.9 to 5.12 may report a connection that was lost during COMMIT as closed before.
func (s *pgSession) sendCommit(ctx context.Context, last []driver.Statement) (pgconn.CommandTag, error) {
	if len(last) == 0 {
		return s.conn.Exec(ctx, "commit")
	}
	var batch pgx.Batch
	var ended error
	queue(&batch, last, &ended)
	var tag pgconn.CommandTag
	batch.Queue("commit").Exec(func(t pgconn.CommandTag) error {
		tag = t
		return nil
	})
	err := s.conn.SendBatch(ctx, &batch).Close()
	if ended != nil { // the following COMMIT found no transaction
		return pgconn.CommandTag{}, ended
	}
	return tag, explained(last, err)
}

// Run implements driver.Runner: it sends the statements in one pipeline.
func (s *pgSession) Run(ctx context.Context, statements []driver.Statement) error {
	var batch pgx.Batch
	var ended error
	queue(&batch, statements, &ended)
	if err := s.SendBatch(ctx, &batch).Close(); err != nil {
		return explained(statements, err)
	}
	return ended
}

// queue adds deferred statements to a batch. It sets ended if one of them ends the transaction.
func queue(batch *pgx.Batch, statements []driver.Statement, ended *error) {
	watch := func(t pgconn.CommandTag) error {
		if endsTransaction(t.String()) {
			*ended = errEndedAtCommit
		}
		return nil
	}
	for _, st := range statements {
		if q := batch.Queue(st.SQL, st.Args...); st.Read != nil {
			q.QueryRow(st.Read)
		} else {
			q.Exec(watch)
		}
	}
}

func explained(statements []driver.Statement, err error) error {
	for _, st := range statements {
		if err != nil && st.Explain != nil {
			err = st.Explain(err)
		}
	}
	return err
}

var errEndedAtCommit = fmt.Errorf("a statement of AtCommit ended the transaction: %w", ErrManaged)

func endsTransaction(tag string) bool {
	return tag == "COMMIT" || tag == "ROLLBACK" || tag == "PREPARE TRANSACTION"
}

// refused reports whether err proves that the transaction did not commit.
func (s *pgSession) refused(err error) bool {
	if state := s.State(); state == driver.Open || state == driver.Failed {
		return true // the server has replied, and reports that the transaction is still open
	}
	var unsent pgx.ErrPreprocessingBatch
	if errors.As(err, &unsent) {
		return true
	}
	var answer *pgconn.PgError
	return errors.As(err, &answer) && driver.Refuses(answer)
}

func (s *pgSession) Rollback(ctx context.Context) error {
	if state := s.State(); state == driver.Idle || state == driver.Lost {
		return nil
	}
	s.clear() // the deadline of a statement whose tracer panicked
	_, err := s.conn.Exec(ctx, "rollback")
	return err
}

// Close releases the connection; the pool destroys a connection that is not idle.
func (s *pgSession) Close() {
	s.clear()
	pgcall.Put(s.pooled, s.silent)
	if s.silent {
		pgcall.Sweep(s.source.pool, s.limits.Begin)
	}
}
