package txretry

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// nested runs fn in a savepoint of the transaction t, or refuses to.
func (m *Manager) nested(ctx context.Context, t *transaction, opts Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	full := opts.withDefaults(&m.cfg)
	if err := full.validate(); err != nil {
		return err
	}
	if !opts.Savepoint {
		return ErrNested
	}
	if opts.AtBegin.SQL != "" {
		return errors.New("txretry: Options.AtBegin of a nested call, which has no BEGIN")
	}
	if strength(opts.Isolation) > strength(t.isolation) {
		return fmt.Errorf("txretry: Options.Isolation %q of a nested call is above %q of the outer one", opts.Isolation, t.isolation)
	}
	if opts.ReadOnly && !t.readOnly {
		return errors.New("txretry: Options.ReadOnly of a nested call, but the outer one may write")
	}
	sp, err := t.root.savepoint(ctx)
	if err != nil {
		return fmt.Errorf("txretry: savepoint of a nested call: %w", err)
	}
	sp.managed = true
	ended := false
	defer func() {
		if !ended { // fn panicked: the outer fn may recover and go on
			_ = m.undo(ctx, sp)
		}
	}()
	err = fn(ctx, sp)
	t.settle()
	if err == nil && t.session.State() == driver.Failed {
		err = because("savepoint rolled back: a statement failed and fn returned nil", pgx.ErrTxCommitRollback, t.failure)
	}
	ended = true
	if err == nil {
		return sp.release(ctx)
	}
	if undone := m.undo(ctx, sp); undone != nil {
		return fmt.Errorf("%w (and its savepoint: %w)", err, undone)
	}
	return err
}

// undo rolls back to a savepoint. Like every rollback it is not interrupted.
func (m *Manager) undo(ctx context.Context, sp *handle) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.bounds.rollback)
	defer cancel()
	return sp.rollback(ctx)
}
