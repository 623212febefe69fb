package txretry

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/internal/session"
)

// savepoint marks the lengths of a transaction's lists at its beginning.
type savepoint struct {
	id, last, hooks int
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
	t.savepoints = append(t.savepoints, savepoint{id: id, last: len(t.last), hooks: len(t.hooks)})
	return &handle{t: t, id: id}, nil
}

// Commit releases the savepoint; on the outer handle it is refused.
func (h *handle) Commit(ctx context.Context) error {
	if _, err := h.endSavepoint(); err != nil {
		return err
	}
	return h.t.ended(h.t.session.Release(ctx, h.id))
}

// Rollback rolls back to the savepoint and releases it; on the outer handle it
// is refused.
func (h *handle) Rollback(ctx context.Context) error {
	sp, err := h.endSavepoint()
	if err != nil {
		return err
	}
	t := h.t
	if err := t.session.RollbackTo(ctx, h.id); err != nil {
		return t.ended(err)
	}
	clear(t.last[sp.last:])
	clear(t.hooks[sp.hooks:])
	t.last, t.hooks, t.failure = t.last[:sp.last], t.hooks[:sp.hooks], nil
	return nil
}

// endSavepoint makes the handle of a savepoint stale, and those inside it.
func (h *handle) endSavepoint() (savepoint, error) {
	if h.closed() {
		return savepoint{}, pgx.ErrTxClosed
	}
	if h.id == 0 {
		return savepoint{}, ErrManaged
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
	if err != nil && t.broken == nil && t.session.State() != session.Failed {
		t.broken = err
	}
	return t.record(err)
}
