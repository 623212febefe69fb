package txretrytest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// database runs the fake transactions. It has a slot for one transaction, the script and the counts.
type database struct {
	slot    chan struct{}
	script  []Fault
	struck  func(attempt int, f Fault) // never nil
	current *fakeSession               // of the slot's holder

	mu    sync.Mutex
	stats Stats
	fates map[string]driver.Outcome // of transactions whose COMMIT got no reply
}

func newDatabase(cfg Config) *database {
	if cfg.Struck == nil {
		cfg.Struck = func(int, Fault) {}
	}
	return &database{slot: make(chan struct{}, 1), script: cfg.Script, struck: cfg.Struck, fates: make(map[string]driver.Outcome)}
}

// Acquire has no time limit: a connection is free unless a transaction is running.
func (db *database) Acquire(ctx context.Context, _ driver.Limits) (driver.Session, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case db.slot <- struct{}{}:
		db.current = &fakeSession{db: db}
		return db.current, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// failEnd applies the fault at the end of fn.
func (db *database) failEnd() error { return db.current.strike(AtEnd) }

func (db *database) count(f func(*Stats)) {
	db.mu.Lock()
	defer db.mu.Unlock()
	f(&db.stats)
}

// nextFault counts an attempt and returns its entry in the script.
func (db *database) nextFault() (attempt int, fault Fault) {
	db.count(func(s *Stats) {
		attempt = s.Attempts
		s.Attempts++
	})
	if attempt < len(db.script) {
		fault = db.script[attempt]
	}
	return attempt, fault
}

// fakeSession is one transaction. It has functions to undo its effects, and the start of each savepoint in that list.
type fakeSession struct {
	db       *database
	attempt  int
	fault    Fault
	state    driver.State
	readOnly bool
	aside    bool // neither scripted nor counted
	xid      string

	statements int // so far
	undo       []func()
	commits    []func() // of effects at COMMIT
	marks      []mark
}

type mark struct{ id, undo int }

func (s *fakeSession) Begin(ctx context.Context, spec *driver.Spec, first *driver.Statement) (tag pgconn.CommandTag, err error) {
	if err = s.begin(ctx, spec); err == nil && first != nil {
		err = s.refuse(first.SQL)
	}
	return tag, err
}

func (s *fakeSession) begin(ctx context.Context, spec *driver.Spec) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if s.aside = spec.Aside; s.aside {
		s.state = driver.Open
		return nil
	}
	s.attempt, s.fault = s.db.nextFault()
	if err := s.strike(AtBegin); err != nil {
		s.state = driver.Idle
		return err
	}
	s.state, s.readOnly = driver.Open, spec.ReadOnly
	if spec.WantsXID {
		s.db.count(func(st *Stats) { s.xid = strconv.Itoa(st.Attempts) })
	}
	return nil
}

// strike returns the scripted error if the fault is at this point.
func (s *fakeSession) strike(at Point) error {
	if s.fault.Point != at || s.state == driver.Failed || s.state == driver.Lost {
		return nil
	}
	s.db.struck(s.attempt, s.fault)
	return s.fail(answer(s.fault.SQLSTATE, scripted))
}

// strikeStatement counts a statement and returns the scripted error if the fault is there.
func (s *fakeSession) strikeStatement() error {
	s.statements++
	if s.statements != s.fault.Statement {
		return nil
	}
	return s.strike(AtStatement)
}

func (s *fakeSession) Tx() pgx.Tx { return fakeTx{s: s} }

func (s *fakeSession) State() driver.State { return s.state }

func (s *fakeSession) XID() string { return s.xid }

func (s *fakeSession) Standby() bool { return false }

func readOnly() error { return answer("25006", "cannot write in a read-only transaction") }

func aborted() error {
	return answer("25P02", "current transaction is aborted, commands ignored until end of transaction block")
}

func (s *fakeSession) Savepoint(ctx context.Context, id int) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	s.marks = append(s.marks, mark{id, len(s.undo)})
	return nil
}

func (s *fakeSession) Release(ctx context.Context, id int) error {
	if err := s.usable(ctx); err != nil {
		return err
	}
	s.cutMarks(id)
	return nil
}

func (s *fakeSession) RollbackTo(ctx context.Context, id int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if s.state == driver.Lost {
		return errClosed
	}
	s.undoTo(s.cutMarks(id))
	s.state = driver.Open
	return nil
}

func (s *fakeSession) usable(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return s.sound()
}

// sound returns the reason why no statement can run, or nil.
func (s *fakeSession) sound() error {
	switch s.state {
	case driver.Failed:
		return aborted()
	case driver.Lost:
		return errClosed
	}
	return nil
}

// cutMarks removes a savepoint and the savepoints inside it, and returns the start of its effects. If several have
// this number, which calls that share a transaction may cause, it uses the last one.
func (s *fakeSession) cutMarks(id int) (undo int) {
	for i, m := range slices.Backward(s.marks) {
		if m.id == id {
			s.marks = s.marks[:i]
			return m.undo
		}
	}
	panic("txretrytest: savepoint not open") // the handle never does this
}

func (s *fakeSession) undoTo(n int) {
	for len(s.undo) > n {
		last := len(s.undo) - 1
		undo := s.undo[last]
		s.undo = s.undo[:last]
		undo()
	}
}

func (s *fakeSession) Commit(_ context.Context, _ time.Duration, last []driver.Statement) (driver.Outcome, error) {
	for _, st := range last {
		if st.Effect == nil {
			return driver.RolledBack, s.refuse(st.SQL)
		}
	}
	if s.fault.Point >= AtCommit {
		s.db.struck(s.attempt, s.fault)
	}
	switch s.fault.Point {
	case AtCommit:
		return s.refuseCommit(answer(s.fault.SQLSTATE, scripted))
	case ReplyLostNotApplied:
		return s.lose(false, errReplyLost)
	}
	err := s.applyLast(last)
	switch {
	case s.fault.Point == ReplyLostApplied:
		return s.lose(err == nil, errReplyLost)
	case err != nil:
		return s.refuseCommit(err)
	}
	s.end(true)
	return driver.Committed, nil
}

// applyLast applies the deferred effects of COMMIT, up to the first error.
func (s *fakeSession) applyLast(last []driver.Statement) error {
	for _, st := range last {
		if s.readOnly {
			return readOnly()
		}
		if err := st.Effect.Apply(); err != nil {
			return err
		}
		s.undo = append(s.undo, st.Effect.Undo)
		s.commits = append(s.commits, st.Effect.Commit)
	}
	return nil
}

// refuseCommit applies nothing. Some errors leave the outcome unknown to the caller.
func (s *fakeSession) refuseCommit(err error) (driver.Outcome, error) {
	var said *pgconn.PgError
	if errors.As(err, &said) && !driver.Refuses(said) {
		return s.lose(false, err)
	}
	return driver.RolledBack, s.fail(err)
}

// lose ends the transaction without a reply that shows the outcome.
func (s *fakeSession) lose(applied bool, err error) (driver.Outcome, error) {
	fate := driver.RolledBack
	if applied {
		fate = driver.Committed
	}
	s.end(applied)
	s.state = driver.Lost
	s.db.count(func(*Stats) { s.db.fates[s.xid] = fate })
	return driver.Unknown, err
}

func (db *database) Fate(_ context.Context, _ driver.Limits, xid string, _ time.Time) (driver.Outcome, error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	if fate, ok := db.fates[xid]; ok {
		return fate, nil
	}
	return driver.Unknown, driver.ErrForgotten
}

func (s *fakeSession) Rollback(context.Context) error {
	if s.state == driver.Open || s.state == driver.Failed {
		s.end(false)
	}
	return nil
}

func (s *fakeSession) end(applied bool) {
	s.state = driver.Idle
	if applied {
		for _, commit := range s.commits {
			commit()
		}
		s.db.count(func(st *Stats) { st.Commits++ })
		return
	}
	s.undoTo(0)
	if !s.aside {
		s.db.count(func(st *Stats) { st.Rollbacks++ })
	}
}

func (s *fakeSession) Close() {
	s.db.current = nil
	<-s.db.slot
}

// Effect changes memory as part of a fake transaction. apply runs immediately. undo runs if the transaction, or the
// savepoint open at this moment, rolls back. Several undos run in reverse order. Neither function may use tx.
//
// It returns an error, and runs neither, if tx is not a transaction of a [Manager] (the error names its type), is
// closed (pgx.ErrTxClosed) or read-only, or has failed before, or if a function is nil.
func Effect(tx pgx.Tx, apply, undo func()) error {
	if apply == nil || undo == nil {
		return errors.New("txretrytest: Effect needs an apply and an undo function")
	}
	return onFake(tx, func(s *fakeSession) error { return s.effect(apply, undo) })
}

func (s *fakeSession) effect(apply, undo func()) error {
	if s.readOnly {
		return s.fail(readOnly())
	}
	apply()
	s.undo = append(s.undo, undo)
	return nil
}

// EffectAtCommit is like [txretry.AtCommit], but for memory: apply runs with COMMIT. Its error makes COMMIT fail,
// like the error of a statement. If several fail, the first error counts.
//
// commit runs when every apply has succeeded, even if the reply of COMMIT is lost. Until then, others must not see
// the changes of apply. undo runs instead if a later apply fails. Both are optional. Everything is dropped when the
// savepoint of the registration rolls back. In a read-only transaction, nothing is applied, and COMMIT fails.
//
// It returns an error, and runs nothing, if tx is not a transaction of a [Manager] (the error names its type) or is
// closed (pgx.ErrTxClosed), or if apply is nil.
func EffectAtCommit(tx pgx.Tx, apply func() error, undo, commit func()) error {
	if apply == nil {
		return errors.New("txretrytest: EffectAtCommit needs an apply function")
	}
	nothing := func() {}
	if undo == nil {
		undo = nothing
	}
	if commit == nil {
		commit = nothing
	}
	h, ok := tx.(interface{ EffectAtCommit(e driver.Effect) bool })
	if !ok {
		return fmt.Errorf("txretrytest: tx is a %T, not a transaction of txretrytest.Manager", tx)
	}
	if !h.EffectAtCommit(driver.Effect{Apply: apply, Undo: undo, Commit: commit}) {
		return pgx.ErrTxClosed
	}
	return nil
}

// Fail makes a fake transaction fail like a failed statement, for example after a fake store found a unique
// violation. Only a rollback is possible afterwards, to a savepoint or of the whole transaction. It returns err, or
// the error that Effect would return for an unusable tx.
func Fail(tx pgx.Tx, err error) error {
	if err == nil {
		return errors.New("txretrytest: Fail needs an error")
	}
	return onFake(tx, func(s *fakeSession) error { return s.fail(err) })
}

// onFake runs the fake's replacement for a statement below tx.
func onFake(tx pgx.Tx, run func(s *fakeSession) error) error {
	h, ok := tx.(interface {
		Statement(run func(s driver.Session) error) error
	})
	if !ok {
		return fmt.Errorf("txretrytest: tx is a %T, not a transaction of txretrytest.Manager", tx)
	}
	return h.Statement(func(s driver.Session) error {
		fake, ok := s.(*fakeSession)
		if !ok {
			return fmt.Errorf("txretrytest: tx is a real transaction (%T on %T), not one of txretrytest.Manager", tx, s)
		}
		if err := fake.sound(); err != nil {
			return err
		}
		if err := fake.strikeStatement(); err != nil {
			return err
		}
		return run(fake)
	})
}

// fail aborts the transaction with err, and closes the connection if the server would.
func (s *fakeSession) fail(err error) error {
	s.state = driver.Failed
	var said *pgconn.PgError
	if errors.As(err, &said) && driver.IsFatal(said) {
		s.end(false)
		s.state = driver.Lost
	}
	return err
}
