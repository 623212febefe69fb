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

// Config configures a [Manager]. The zero value works.
type Config struct {
	// Script has the fault of each attempt, in order over all calls. An attempt without an entry, or with a zero
	// Fault, succeeds.
	Script []Fault

	// Struck is called for each fault of Script that happens, with its index in Script. It is not called for a fault
	// whose attempt ends before the fault's Point. It must not block. Nil: no call.
	Struck func(attempt int, f Fault)

	// Retry is the configuration of the retry loop, as for txretry.New.
	Retry txretry.Config
}

// Manager runs functions in fake transactions, one at a time. It implements
// txretry.Transactor and is safe for concurrent use.
type Manager struct {
	db    *database
	inner *txretry.Manager
}

// Stats has the counts of a [Manager].
type Stats struct {
	Attempts  int // transactions started, or failed at BEGIN by the script
	Commits   int // transactions applied, even if the reply was lost
	Rollbacks int // transactions started and not applied
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

// Do is like txretry.Manager.Do on a fake transaction.
func (m *Manager) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return m.DoWith(ctx, txretry.Options{}, fn)
}

// DoWith is like txretry.Manager.DoWith on a fake transaction. The isolation and the timeouts in opts have no effect.
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

// inside is the context key that marks a nested call, whose end is not the end of the outer call.
type inside struct{ m *Manager }

// Stats returns the counts so far.
func (m *Manager) Stats() Stats {
	m.db.mu.Lock()
	defer m.db.mu.Unlock()
	return m.db.stats
}

var errNoSQL = errors.New("txretrytest: a fake transaction runs no SQL")

// maxQuote is the maximum length of a quoted statement in an error.
const maxQuote = 200

// fakeTx rejects statements. The handle above it handles Begin, Commit and Rollback, so they are never called here.
type fakeTx struct {
	pgx.Tx
	s *fakeSession
}

// refuse aborts the transaction, so that Do returns the mistake even if the caller ignores this error.
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
	Statement int    // AtStatement only: the number of the statement in the attempt, from 1
	SQLSTATE  string // the server's error, such as "40001"; empty for a lost reply
}

// Point is the place where an attempt fails.
type Point int

// The places where an attempt can fail.
const (
	noFault Point = iota

	AtBegin     // the transaction does not start
	AtStatement // the n-th Effect or Fail does not run
	AtEnd       // fn succeeds, then fails as if by its last statement; not at the end of a nested call
	AtCommit    // COMMIT fails and applies nothing; with 08xxx, 40003 and 57P0x the caller cannot know this

	ReplyLostApplied    // COMMIT is applied, unless one of its statements fails; its reply is lost
	ReplyLostNotApplied // COMMIT is not applied, and its reply is lost
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

// answer returns a server error. With 57P0x, the server shuts down and closes the connection.
func answer(sqlstate, text string) *pgconn.PgError {
	severity := "ERROR"
	if strings.HasPrefix(sqlstate, "57P0") {
		severity = "FATAL"
	}
	return &pgconn.PgError{Severity: severity, SeverityUnlocalized: severity, Code: sqlstate, Message: text}
}

// TB has the methods of *testing.T that a Prove function uses.
type TB interface {
	Helper()
	Context() context.Context
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
}

// Proof configures a Prove function: the database for the code, and the rows to compare. [Prove] is for a
// transaction, inboxtest.Prove for a handler, idempotencytest.Prove for work with an idempotency key,
// expirytest.Prove for a sweep.
//
// A Prove function first runs the code undisturbed, twice, and counts the statements. Then, for each statement,
// including BEGIN and COMMIT, it starts the code on new connections. Each of these runs is called a schedule. A
// schedule does one of the following:
//
//   - It kills the process before the statement, or after it without a reply. Another process does the work again.
//     Then the first process continues without its connections, like a process that was only stopped.
//   - It loses the connection after the statement, and the process continues. At COMMIT, this means a lost reply.
//   - It makes the server reject the statement, with a statement timeout (57014), or COMMIT with a conflict (40001).
//   - It makes two processes do work that has a key at the same time. The first waits before the statement.
//
// Work that has a key is also done again after it was done. Each time, the work is repeated until it succeeds, as a
// broker, a client or a timer would. Then the rows must equal those of the undisturbed run. A killed process must
// leave either all of these rows or none. After the first schedule with other rows, the test fails. The error names
// the statement, the different rows and a fix. A handler with five statements has about 40 schedules, which take a
// few seconds.
//
// Statements of one round trip, such as a batch, count as one. At most 100 are allowed. A crash of the server is not
// tested, because a process sees it as a lost connection.
type Proof struct {
	// Pool is a pool on the database, in which the tables exist. The code runs on pools with the same configuration.
	// Nobody else may write to the tables during the test. Required.
	Pool *pgxpool.Pool

	// Reset is SQL, of one or several statements, that prepares the tables for the work before each schedule. It must
	// delete everything from earlier schedules, including inbox entries and idempotency records, and write the rows
	// that the work needs. Required.
	Reset string

	// Rows are the queries whose results are compared, in any order of rows, such as "TABLE invoices". Leave out
	// columns that may differ between attempts, such as ids from a sequence and times: "SELECT order_id, cents FROM
	// invoices". Required.
	Rows []string

	// Effects returns the number of effects elsewhere, such as mails, since the start. Each schedule must add as many
	// as the undisturbed run, so count effects with the same key on the other side once. Optional.
	Effects func() int
}

// Prove runs a transaction of yours with faults, as [Proof] describes. start simulates a process: it receives a pool
// and returns the function to prove, which calls txretry.Manager.Do on the pool. Such a function has no key. It is
// therefore repeated only if a fault left nothing of it, and never run by two processes at once.
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
