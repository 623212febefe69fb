package txretrytest

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// Effect changes memory as part of a fake transaction: apply runs at once, undo
// runs if the transaction, or the savepoint open at this moment, rolls back.
// Several undos run in reverse order. Neither function may use tx.
//
// It returns an error, and runs neither, if tx is not a transaction of a
// [Manager] (the error names what it is), is closed (pgx.ErrTxClosed) or read
// only, or has failed before; and if a function is nil.
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

// EffectAtCommit is to memory what [txretry.AtCommit] is to SQL: apply runs with COMMIT. Its error makes
// COMMIT fail, as that of a statement does; of several errors it is the first.
//
// commit runs as soon as every apply has succeeded, also where the reply of COMMIT is lost: until then
// others must not see what apply has done. undo runs instead if a later apply fails. Both are optional.
// All is dropped when the savepoint it was registered in rolls back, and without effect in a transaction
// that only reads, whose COMMIT fails.
//
// It returns an error, and runs nothing, if tx is not a transaction of a [Manager] (the error names what
// it is) or is closed (pgx.ErrTxClosed), or if apply is nil.
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
		return fmt.Errorf("txretrytest: not a transaction of txretrytest.Manager but a %T", tx)
	}
	if !h.EffectAtCommit(driver.Effect{Apply: apply, Undo: undo, Commit: commit}) {
		return pgx.ErrTxClosed
	}
	return nil
}

// Fail makes a fake transaction fail as a statement's error does, such as a
// unique violation found by a fake store: nothing but a rollback, to a savepoint
// or of the whole, is possible afterwards. It returns err, or what Effect
// returns for a tx that cannot be used.
func Fail(tx pgx.Tx, err error) error {
	if err == nil {
		return errors.New("txretrytest: Fail needs an error")
	}
	return onFake(tx, func(s *fakeSession) error { return s.fail(err) })
}

// onFake runs what stands for a statement on the fake below tx.
func onFake(tx pgx.Tx, run func(s *fakeSession) error) error {
	h, ok := tx.(interface {
		Statement(run func(s driver.Session) error) error
	})
	if !ok {
		return fmt.Errorf("txretrytest: not a transaction of txretrytest.Manager but a %T", tx)
	}
	return h.Statement(func(s driver.Session) error {
		fake, ok := s.(*fakeSession)
		if !ok {
			return fmt.Errorf("txretrytest: not a transaction of txretrytest.Manager but a real one (%T on %T)", tx, s)
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

// fail aborts the transaction with err, and closes the connection where the server would.
func (s *fakeSession) fail(err error) error {
	s.state = driver.Failed
	var said *pgconn.PgError
	if errors.As(err, &said) && driver.IsFatal(said) {
		s.end(false)
		s.state = driver.Lost
	}
	return err
}
