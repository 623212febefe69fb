package txretrytest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/prove"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// Config configures a [Manager]. The zero value is usable.
type Config struct {
	// Script holds the fault of each attempt, in order over all calls. Attempts
	// beyond its end succeed, as those with a zero Fault do.
	Script []Fault

	// Struck is called for each fault of Script that happens, with its index in Script. It is not called
	// for a fault whose attempt ends before the fault's Point. It must not block. Nil is allowed.
	Struck func(attempt int, f Fault)

	// Retry is the configuration of the retry loop, as of txretry.New.
	Retry txretry.Config
}

// Manager runs functions in fake transactions, one at a time. It implements
// txretry.Transactor and is safe for concurrent use.
type Manager struct {
	db    *database
	inner *txretry.Manager
}

// Stats counts what a [Manager] has done.
type Stats struct {
	Attempts  int // transactions begun, or refused to begin by the script
	Commits   int // transactions applied, also where the reply was lost
	Rollbacks int // transactions begun and not applied
}

// New returns a Manager. It panics if cfg is invalid.
func New(cfg Config) *Manager {
	db := newDatabase(cfg)
	inner, err := txretry.NewOver(db, cfg.Retry)
	if err := errors.Join(err, checkScript(cfg.Script)); err != nil {
		panic(err)
	}
	return &Manager{db: db, inner: inner}
}

// Do is txretry.Manager.Do on a fake transaction.
func (m *Manager) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return m.DoWith(ctx, txretry.Options{}, fn)
}

// DoWith is txretry.Manager.DoWith on a fake transaction. Of the options the
// isolation and the timeouts change nothing.
func (m *Manager) DoWith(ctx context.Context, opts txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	if outer, ok := ctx.Value(inside{m}).(*atomic.Bool); fn == nil || ok && outer.Load() {
		return m.inner.DoWith(ctx, opts, fn)
	}
	return m.inner.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		var running atomic.Bool
		running.Store(true)
		defer running.Store(false)
		if err := fn(context.WithValue(ctx, inside{m}, &running), tx); err != nil {
			return err
		}
		return m.db.failEnd()
	})
}

// inside is the context key of what tells a nested call, whose end is not the call's.
type inside struct{ m *Manager }

// Stats returns the counts up to now.
func (m *Manager) Stats() Stats {
	m.db.mu.Lock()
	defer m.db.mu.Unlock()
	return m.db.stats
}

var errNoSQL = errors.New("txretrytest: a fake transaction runs no SQL")

// maxQuote bounds how much of a statement an error quotes.
const maxQuote = 200

// fakeTx refuses statements. Begin, Commit and Rollback are the handle's above
// it and never come here.
type fakeTx struct {
	pgx.Tx
	s *fakeSession
}

// refuse aborts the transaction: the mistake comes out of Do even if the caller
// ignores this error.
func (s *fakeSession) refuse(sql string) error {
	if s.state == driver.Lost {
		return errClosed
	}
	if len(sql) > maxQuote {
		sql = sql[:maxQuote] + "…"
	}
	return s.fail(fmt.Errorf("%w: %q", errNoSQL, sql))
}

func (t fakeTx) Exec(_ context.Context, sql string, _ ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, t.s.refuse(sql)
}

func (t fakeTx) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	return t.failed(sql).Query()
}

func (t fakeTx) QueryRow(_ context.Context, sql string, _ ...any) pgx.Row {
	return t.failed(sql).QueryRow()
}

func (t fakeTx) failed(sql string) pgx.BatchResults {
	return pgx.FailedBatchResults(&pgx.Batch{}, t.s.refuse(sql))
}

func (t fakeTx) SendBatch(_ context.Context, b *pgx.Batch) pgx.BatchResults {
	sql := "(empty batch)"
	if b.Len() > 0 {
		sql = b.QueuedQueries[0].SQL
	}
	return pgx.FailedBatchResults(b, t.s.refuse(sql))
}

func (t fakeTx) CopyFrom(_ context.Context, table pgx.Identifier, _ []string, _ pgx.CopyFromSource) (int64, error) {
	return 0, t.s.refuse("copy " + table.Sanitize() + " from stdin")
}

func (t fakeTx) Prepare(_ context.Context, _, sql string) (*pgconn.StatementDescription, error) {
	return nil, t.s.refuse(sql)
}

func (fakeTx) LargeObjects() pgx.LargeObjects { return pgx.LargeObjects{} }

func (fakeTx) Conn() *pgx.Conn { return nil }

// Fault makes one attempt fail. The zero Fault lets it succeed.
type Fault struct {
	Point     Point
	Statement int    // AtStatement only: which one of the attempt, from 1
	SQLSTATE  string // what the server answers, such as "40001"; none for a lost reply
}

// Point is the place where an attempt fails.
type Point int

// The places where an attempt can fail.
const (
	noFault Point = iota

	AtBegin     // the transaction does not begin
	AtStatement // the n-th Effect or Fail is not run
	AtEnd       // fn has succeeded, then fails as if by its last statement; not that of a nested call
	AtCommit    // COMMIT is refused; nothing is applied, but of 08xxx, 40003 and 57P0x that is unknown

	ReplyLostApplied    // COMMIT is applied, unless a statement of it fails; its reply does not arrive
	ReplyLostNotApplied // COMMIT is not applied, and no reply arrives
)

var (
	errReplyLost = errors.New("txretrytest: connection lost during COMMIT")
	errClosed    = errors.New("txretrytest: connection closed")
)

const scripted = "scripted by txretrytest"

func checkScript(script []Fault) error {
	var errs []error
	for i, f := range script {
		if err := f.check(); err != nil {
			errs = append(errs, fmt.Errorf("txretrytest: Config.Script[%d]: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

func (f Fault) check() error {
	if f.Point < noFault || f.Point > ReplyLostNotApplied {
		return fmt.Errorf("unknown Point %d", f.Point)
	}
	if answers := f.Point >= AtBegin && f.Point <= AtCommit; answers != (len(f.SQLSTATE) == 5) || (!answers && f.SQLSTATE != "") {
		return fmt.Errorf("SQLSTATE %q does not fit its Point", f.SQLSTATE)
	}
	if (f.Point == AtStatement) != (f.Statement > 0) || f.Statement < 0 {
		return fmt.Errorf("a Statement of %d does not fit its Point", f.Statement)
	}
	return nil
}

// answer is what a server says, which closes the connection when it shuts down (57P0x).
func answer(sqlstate, text string) *pgconn.PgError {
	severity := "ERROR"
	if strings.HasPrefix(sqlstate, "57P0") {
		severity = "FATAL"
	}
	return &pgconn.PgError{Severity: severity, SeverityUnlocalized: severity, Code: sqlstate, Message: text}
}

// TB is what a Prove function needs of a *testing.T.
type TB interface {
	Helper()
	Context() context.Context
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
}

// Proof says on which database a Prove function runs code, and what it compares. [Prove] is for a
// transaction, inboxtest.Prove for a handler, idempotencytest.Prove for what has an idempotency key,
// expirytest.Prove for a sweep.
//
// A Prove function first runs the code undisturbed, twice, and counts the statements. Then, for each
// statement, BEGIN and COMMIT included, it starts the code anew on connections of its own and
//
//   - kills the process before the statement, then after it, when nobody has heard the answer: another
//     process does the work again, and then the first one goes on as one that was only stopped, without
//     its connections;
//   - loses the connection after the statement, while the process goes on: at COMMIT that is the reply
//     which is lost;
//   - has the server refuse the statement, as one that takes too long (57014), or COMMIT by a conflict (40001);
//   - has two processes do work that has a key at once, the first waiting before the statement.
//
// Work that has a key is also done again after it was done. Each time the work is repeated until it is
// done, as a broker, a client or a schedule would. The rows must then be those of the undisturbed run.
// A killed process must have left either these or none. The first schedule after which they are not is
// an error of the test; it says at which statement which rows differ, and how to mend that. Of a handler
// with five statements there are some 40 schedules, which take a few seconds.
//
// Statements of one round trip, such as a batch, count as one. At most 100 are allowed. A crash of the
// server is not tried: to a process it is a lost connection.
type Proof struct {
	// Pool is on the database, whose tables exist. Its configuration is that of the pools on which
	// the code runs. Nobody else may write to the tables meanwhile. Required.
	Pool *pgxpool.Pool

	// Reset is SQL, of several statements if need be, that brings the tables to the state in which the
	// work is to be done: before each schedule it must delete all that an earlier one has left, the
	// entry in the inbox or the record of the idempotency key too, and write what the work begins with.
	// Required.
	Reset string

	// Rows are the queries whose results are compared, in any order of rows, such as "TABLE invoices".
	// Leave out the columns that may differ from attempt to attempt, such as ids from a sequence and
	// times: "SELECT order_id, cents FROM invoices". Required.
	Rows []string

	// Effects counts what the code does elsewhere, such as mails, since the beginning. The difference
	// that a schedule makes must be that of the undisturbed run, so count what has the same key on the
	// other side once. Optional.
	Effects func() int
}

// Prove runs a transaction of yours under faults, as [Proof] describes. start makes a process: it is
// given a pool and returns the function to prove, which calls txretry.Manager.Do on it. Since such a
// function has no key, it is only done again where a fault has left nothing of it, and never by two
// processes at once.
func Prove(t TB, p Proof, start func(pool *pgxpool.Pool) (run func(ctx context.Context) error, err error)) {
	t.Helper()
	prove.Run(t, prove.Proof(p), prove.Work{
		Name: "txretrytest.Prove",
		Start: func(_ context.Context, pool *pgxpool.Pool) (func(ctx context.Context) prove.Outcome, error) {
			run, err := start(pool)
			return func(ctx context.Context) prove.Outcome { return prove.Outcome{Err: run(ctx)} }, err
		},
	})
}
