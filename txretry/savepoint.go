package txretry

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// savepoint remembers what was registered before it began.
type savepoint struct {
	id      int
	pending pending
	hooks   int
}

func (t *transaction) savepointIndex(id int) int {
	for i, sp := range t.savepoints {
		if sp.id == id {
			return i
		}
	}
	return -1
}

// Begin starts a savepoint and returns its handle.
func (h *handle) Begin(ctx context.Context) (pgx.Tx, error) {
	sp, err := h.savepoint(ctx)
	if err != nil {
		return nil, err
	}
	return sp, nil
}

func (h *handle) savepoint(ctx context.Context) (*handle, error) {
	t := h.t
	if h.closed() {
		return nil, pgx.ErrTxClosed
	}
	t.settle()
	id := t.savepointN + 1
	if err := t.session.Savepoint(ctx, id); err != nil {
		return nil, t.record(err)
	}
	t.savepointN = id
	t.savepoints = append(t.savepoints, savepoint{id, *t.pending, len(t.afterCommit)})
	return &handle{t: t, id: id}, nil
}

// Commit releases the savepoint; on a handle that Do gave to fn it is refused.
func (h *handle) Commit(ctx context.Context) error {
	if err := h.endable(); err != nil {
		return err
	}
	return h.release(ctx)
}

// Rollback rolls back to the savepoint and releases it; on a handle that Do gave
// to fn it is refused.
func (h *handle) Rollback(ctx context.Context) error {
	if err := h.endable(); err != nil {
		return err
	}
	return h.rollback(ctx)
}

func (h *handle) endable() error {
	switch {
	case h.closed():
		return pgx.ErrTxClosed
	case h.managed:
		return ErrManaged
	}
	return nil
}

func (h *handle) release(ctx context.Context) error {
	if _, err := h.endSavepoint(); err != nil {
		return err
	}
	return h.t.ended(h.t.session.Release(ctx, h.id))
}

func (h *handle) rollback(ctx context.Context) error {
	sp, err := h.endSavepoint()
	if err != nil {
		return err
	}
	t := h.t
	if err := t.session.RollbackTo(ctx, h.id); err != nil {
		return t.ended(err)
	}
	clear(t.afterCommit[sp.hooks:])
	t.afterCommit, t.failure = t.afterCommit[:sp.hooks], nil
	t.restore(sp.pending)
	return nil
}

// endSavepoint makes the handle of a savepoint stale, and those inside it.
func (h *handle) endSavepoint() (savepoint, error) {
	if h.closed() {
		return savepoint{}, pgx.ErrTxClosed
	}
	h.t.settle()
	i := h.t.savepointIndex(h.id)
	sp := h.t.savepoints[i]
	h.t.savepoints = h.t.savepoints[:i]
	return sp, nil
}

// ended looks at the error of a savepoint's end. If the server did not refuse
// it, the server may not know of it: the transaction must not commit then.
func (t *transaction) ended(err error) error {
	if err != nil && t.broken == nil && t.session.State() != driver.Failed {
		t.broken = fmt.Errorf("a savepoint could not be ended: %w", err)
	}
	return t.record(err)
}
