package txretrysql

import (
	"context"
	"database/sql"
	sqldriver "database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// session runs one transaction on a connection of a *sql.DB.
type session struct {
	conn   *sql.Conn
	limits driver.Limits
	bridge bridge
	cancel context.CancelFunc // interrupts the calls of database/sql for the transaction
	xid    string

	failed bool      // a statement failed; for drivers that do not report the state
	broken bool      // the connection must not be used again
	since  time.Time // time of the last reply
}

// Begin sends BEGIN and the settings in two messages, because database/sql does not support settings.
func (s *session) Begin(ctx context.Context, spec *driver.Spec, first *driver.Statement) (tag pgconn.CommandTag, err error) {
	if first != nil && first.Look != nil {
		err = s.look(ctx, first.Look)
	}
	if err == nil {
		err = s.open(ctx, spec.ReadOnly)
	}
	if err == nil {
		err = s.set(ctx, spec)
	}
	if err != nil {
		if sqlstate.Of(err) == "" && ctx.Err() == nil {
			s.broken = true
			err = fmt.Errorf("%w: %w", driver.ErrNotBegun, err)
		}
		return tag, err
	}
	if first != nil {
		tag, err = s.bridge.Exec(ctx, first.SQL, first.Args...)
	}
	return tag, err
}

// look runs a query outside of the transaction.
func (s *session) look(ctx context.Context, look *driver.Look) error {
	args, err := plainArgs(look.Args)
	if err != nil {
		return err
	}
	b := &bridge{patience: s.limits.Begin, s: s}
	ctx, cancel, answered := b.bounded(ctx)
	found, err := s.conn.QueryContext(ctx, look.SQL, args...)
	if err = answered(err); err != nil {
		cancel()
		return err
	}
	return look.Read(row{&rows{b: b, rows: found, cancel: cancel}})
}

// open begins the transaction. Its context is also used for COMMIT and ROLLBACK, so ctx can end it only until then.
func (s *session) open(ctx context.Context, readOnly bool) error {
	lasting, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	stop := context.AfterFunc(ctx, cancel)
	timer := time.AfterFunc(s.limits.Begin, cancel)
	tx, err := s.conn.BeginTx(lasting, &sql.TxOptions{ReadOnly: readOnly})
	if intime := timer.Stop(); !stop() {
		err = errors.Join(ctx.Err(), err)
	} else if !intime {
		err = errors.Join(driver.ErrSilent, err)
	}
	if tx != nil {
		s.bridge = bridge{tx: tx, patience: s.limits.Begin, s: s}
	}
	return s.note(err)
}

// set runs the rest of the begin message.
func (s *session) set(ctx context.Context, spec *driver.Spec) error {
	parts := spec.Parts
	if spec.WantsXID {
		parts = parts[:len(parts)-1]
	}
	_, err := s.bridge.Exec(ctx, "set transaction"+strings.TrimPrefix(strings.Join(parts, "; "), "begin"))
	if err == nil && spec.WantsXID {
		err = s.bridge.QueryRow(ctx, "select pg_current_xact_id()::text").Scan(&s.xid)
	}
	s.bridge.patience = s.limits.Statement
	return err
}

func (s *session) Tx() pgx.Tx { return &s.bridge }

func (s *session) XID() string { return s.xid }

func (s *session) Standby() bool {
	conn, _ := s.below()
	return conn != nil && conn.PgConn().ParameterStatus("in_hot_standby") == "on"
}

// State returns the state of the connection below database/sql if the driver is pgx's. For other drivers it uses the
// connection's validity (driver.Validator), and the results of statements on the handle. database/sql closes open
// rows before COMMIT.
func (s *session) State() driver.State {
	conn, valid := s.below()
	switch {
	case !valid:
		return driver.Lost
	case s.over():
		return driver.Idle
	case conn == nil && s.failed:
		return driver.Failed
	case conn == nil:
		return driver.Open
	}
	switch conn.PgConn().TxStatus() {
	case 'T':
		return driver.Open
	case 'E':
		return driver.Failed
	}
	return driver.Idle
}

// over reports whether the transaction was ended by its own methods. database/sql checks this before it checks the
// statement. If the transaction is open, it rejects the statement as one of another database. In both cases nothing
// is sent.
func (s *session) over() bool {
	return s.bridge.tx == nil || errors.Is(s.bridge.tx.StmtContext(context.Background(), new(sql.Stmt)).Close(), sql.ErrTxDone)
}

// below returns pgx's connection, if there is one, and whether the connection is still usable.
func (s *session) below() (conn *pgx.Conn, valid bool) {
	valid = !s.broken
	err := s.conn.Raw(func(raw any) error {
		switch raw := raw.(type) {
		case interface{ Conn() *pgx.Conn }:
			conn = raw.Conn()
			valid = valid && !conn.IsClosed()
		case sqldriver.Validator:
			valid = valid && raw.IsValid()
		}
		return nil
	})
	return conn, valid && err == nil
}

// note records the effect of an error on the transaction, and converts it to one of pgx's.
func (s *session) note(err error) error {
	s.since = time.Now()
	if err == nil {
		return nil
	}
	if errors.Is(err, sqldriver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) {
		s.broken = true
	}
	if sqlstate.Of(err) != "" {
		s.failed = true
	}
	_, valid := s.below()
	return answerOf(err, !valid)
}

func (s *session) Savepoint(ctx context.Context, id int) error {
	_, err := s.bridge.Exec(ctx, "savepoint "+savepointName(id))
	return err
}

func (s *session) Release(ctx context.Context, id int) error {
	_, err := s.bridge.Exec(ctx, "release savepoint "+savepointName(id))
	return err
}

func (s *session) RollbackTo(ctx context.Context, id int) error {
	name := savepointName(id)
	_, err := s.bridge.Exec(ctx, "rollback to savepoint "+name+"; release savepoint "+name)
	if err == nil {
		s.failed = false
	}
	return err
}

func savepointName(id int) string { return "holdfast_" + strconv.Itoa(id) }

// maxSilence is how long a transaction may send nothing before COMMIT is preceded by a ping: see txretry.
const maxSilence = time.Second

// Commit runs the last statements, and then COMMIT.
func (s *session) Commit(ctx context.Context, timeout time.Duration, last []driver.Statement) (driver.Outcome, error) {
	defer time.AfterFunc(timeout, s.cancel).Stop()
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := s.before(ctx, last); err != nil {
		return driver.RolledBack, err
	}
	if s.State() == driver.Idle {
		return driver.Unknown, errEnded
	}
	err := s.bridge.tx.Commit()
	switch {
	case err == nil:
		return driver.Committed, nil
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return driver.RolledBack, err
	}
	err = s.note(err)
	if answer, ok := errors.AsType[*pgconn.PgError](err); ok {
		if driver.Refuses(answer) && !strings.HasPrefix(answer.Code, "57P") {
			return driver.RolledBack, err
		}
		return driver.Unknown, err
	}
	if s.alive(ctx) {
		// The driver has received all replies, and the server has rejected nothing. So the driver did not send COMMIT
		// because a statement had failed, like lib/pq.
		return driver.RolledBack, fmt.Errorf("%w: %w", pgx.ErrTxCommitRollback, err)
	}
	return driver.Unknown, err
}

var errEnded = fmt.Errorf("a statement of AtCommit ended the transaction: %w", txretry.ErrManaged)

var errRowsOpen = errors.New("txretrysql: rows of a query are still open: close them before fn returns")

// before runs the steps before COMMIT. Until COMMIT is sent, nothing can have committed.
func (s *session) before(ctx context.Context, last []driver.Statement) error {
	if len(last) == 0 && time.Since(s.since) > maxSilence && !s.alive(ctx) {
		return driver.ErrNotSent
	}
	if conn, _ := s.below(); len(last) > 0 && conn != nil && conn.PgConn().IsBusy() {
		return errRowsOpen
	}
	err := s.Run(ctx, last)
	if sqlstate.Of(err) == "25P02" { // from a driver that does not report the state
		return fmt.Errorf("%w: %w", pgx.ErrTxCommitRollback, err)
	}
	if err != nil && s.State() == driver.Lost && sqlstate.Of(err) == "" {
		err = fmt.Errorf("%w: %w", driver.ErrNotSent, err)
	}
	return err
}

// Run implements driver.Runner: it sends the statements one after the other.
func (s *session) Run(ctx context.Context, statements []driver.Statement) error {
	for _, st := range statements {
		err := s.run(ctx, st)
		if err != nil && st.Explain != nil {
			err = st.Explain(err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *session) run(ctx context.Context, st driver.Statement) error {
	if st.Read != nil {
		return st.Read(s.bridge.QueryRow(ctx, st.SQL, st.Args...))
	}
	_, err := s.bridge.Exec(ctx, st.SQL, st.Args...)
	return err
}

// alive pings the server.
func (s *session) alive(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, s.limits.Begin)
	defer cancel()
	return s.conn.PingContext(ctx) == nil
}

func (s *session) Rollback(ctx context.Context) error {
	if s.bridge.tx == nil {
		return nil
	}
	defer context.AfterFunc(ctx, s.cancel)()
	err := s.bridge.tx.Rollback()
	if errors.Is(err, sql.ErrTxDone) {
		return nil
	}
	s.broken = s.broken || err != nil
	return err
}

// Close releases the connection, or closes it if it is broken.
func (s *session) Close() {
	if s.broken {
		_ = s.conn.Raw(func(any) error { return sqldriver.ErrBadConn })
	}
	_ = s.conn.Close() // an error only means that the connection is closed already
	if s.cancel != nil {
		s.cancel()
	}
}

// source provides the connections of a *sql.DB.
type source struct {
	db   *sql.DB
	pool *pgxpool.Pool
}

// Pool implements driver.Pooler.
func (s source) Pool() *pgxpool.Pool { return s.pool }

var errNoConnection = errors.New("no connection became free")

func (s source) Acquire(ctx context.Context, limits driver.Limits) (driver.Session, error) {
	bounded, cancel := context.WithTimeout(ctx, limits.Acquire)
	defer cancel()
	conn, err := s.db.Conn(bounded)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		stat := s.db.Stats()
		return nil, fmt.Errorf("%w within %v: maximum %d (0: no limit), open %d, in use %d",
			errNoConnection, limits.Acquire, stat.MaxOpenConnections, stat.OpenConnections, stat.InUse)
	}
	if err != nil {
		return nil, answerOf(err, true)
	}
	return &session{conn: conn, limits: limits}, nil
}

// Fate implements driver.Source.
func (s source) Fate(ctx context.Context, limits driver.Limits, xid string, begun time.Time) (driver.Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, limits.Begin)
	defer cancel()
	var status *string
	var ended any
	err := s.db.QueryRowContext(ctx, driver.AskFate, xid, driver.AgeOf(begun)).Scan(&status, &ended)
	return driver.FateOf(status, sqlstate.Of(err), err)
}

// New returns a Manager that runs its transactions on db. pool must be a pool of the same database. Stores on the
// Manager use it outside of transactions, for example to listen, prune and look up records. A few connections are
// enough. pool may be nil if only transactions are needed. The error names every invalid field of cfg.
func New(db *sql.DB, pool *pgxpool.Pool, cfg txretry.Config) (*txretry.Manager, error) {
	if db == nil {
		return nil, errors.New("txretrysql: db is nil")
	}
	return txretry.NewOver(source{db, pool}, cfg)
}

// Tx returns the database/sql transaction below tx: of a Manager of [New], or the one passed to [Wrap]. It is nil if
// tx is neither, or no longer open. Do not end it.
func Tx(tx pgx.Tx) *sql.Tx {
	if own, ok := tx.(*bridge); ok {
		return own.tx
	}
	var found *sql.Tx
	if h, ok := tx.(interface {
		Expose()
		Statement(run func(s driver.Session) error) error
	}); ok {
		_ = h.Statement(func(s driver.Session) error { // an error means that the handle is stale
			if own, ok := s.(*session); ok {
				found = own.bridge.tx
			}
			return nil
		})
		if found != nil {
			h.Expose()
		}
	}
	return found
}

// Wrap returns a pgx.Tx whose statements run in tx, for outboxpgx.Store's Write and WriteOnce. The caller ends tx,
// and then calls Store.Wake. For a nil tx it returns nil.
func Wrap(tx *sql.Tx) pgx.Tx {
	if tx == nil {
		return nil
	}
	return &bridge{tx: tx}
}

// The creator of the *sql.Tx calls Begin, Commit and Rollback.

func (b *bridge) Begin(context.Context) (pgx.Tx, error) { return nil, txretry.ErrManaged }
func (b *bridge) Commit(context.Context) error          { return txretry.ErrManaged }
func (b *bridge) Rollback(context.Context) error        { return txretry.ErrManaged }
