package txretry

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// pending is the work of a transaction that waits for COMMIT: deferred statements, and functions that
// run after it.
//
// A savepoint may roll part of the transaction back, and the user may have set it by a statement of any
// form, as GORM, bun and ent do. So nothing waits across a statement that could set one, end one, or change
// the role or the search path. Before such a statement the deferred statements are sent, and the server
// itself undoes them from then on. A function cannot be sent, but a mark for it can: a setting that
// Postgres rolls back like a row. COMMIT reads the marks, and a function whose mark has gone does not run.
//
// The stretch of a transaction between two such statements has one mark. Savepoints of handles need none:
// see restore.
type pending struct {
	statements []driver.Statement
	unmarked   int  // functions of the current stretch, whose mark has not been sent
	marked     bool // a mark has been sent

	// gone has an element for each stretch that has ended: the functions registered in it do not run. That
	// of a stretch with a mark is true until COMMIT has read the mark.
	gone []bool

	// exposed is set when the user has the bare connection: statements on it are not seen here, so nothing waits.
	exposed bool
	// anyText is set when the name of a prepared statement reads like a statement of another kind.
	anyText bool
}

// hook is a function that runs after COMMIT.
type hook struct {
	fn      func()
	stretch int  // where it was registered
	hint    bool // it may run although its savepoint was rolled back
}

func (p *pending) stretch() int { return len(p.gone) }

// runs reports whether the transaction, which has committed, includes the work of a hook.
func (p *pending) runs(h hook) bool { return h.hint || h.stretch >= len(p.gone) || !p.gone[h.stretch] }

func (p *pending) waits() bool { return len(p.statements) > 0 || p.unmarked > 0 }

// drop ends the stretch without its work, which the server rolls back.
func (p *pending) drop() {
	if p.waits() {
		p.statements, p.unmarked = nil, 0
		p.gone = append(p.gone, true)
	}
}

// markName is the setting that lists the marks. It lasts until the end of the transaction.
const markName = "holdfast.kept"

const (
	setMark   = "select set_config('" + markName + "', concat(current_setting('" + markName + "', true), ' ', $1::text), true)"
	readMarks = "select coalesce(current_setting('" + markName + "', true), '')"
)

// atCommit returns the statements that travel with COMMIT.
func (p *pending) atCommit() []driver.Statement {
	if !p.marked {
		return p.statements
	}
	return append(p.statements, driver.Statement{SQL: readMarks, Read: func(row pgx.Row) error {
		var kept string
		if err := row.Scan(&kept); err != nil {
			return err
		}
		for _, mark := range strings.Fields(kept) {
			if n, err := strconv.Atoi(mark); err == nil && n >= 0 && n < len(p.gone) {
				p.gone[n] = false
			}
		}
		return nil
	}})
}

// doomed reports whether a statement has failed: what happens until the next rollback is part of that.
func (t *transaction) doomed() bool {
	t.settle()
	return t.session.State() == driver.Failed
}

// before prepares the transaction for a statement. tame says that the statement is plain: see isPlain.
func (t *transaction) before(ctx context.Context, tame func() bool) error {
	p := t.pending
	if !p.waits() {
		return nil
	}
	if t.session.State() == driver.Failed {
		// Only a rollback can follow: of everything, to a savepoint of a handle, or to another one. That was set
		// before the work here was registered, because nothing waits across the statement that sets one.
		p.drop()
		return nil
	}
	if !p.anyText && tame() {
		return nil
	}
	return t.flush(ctx)
}

// flush sends what waits, and ends the stretch.
func (t *transaction) flush(ctx context.Context) error {
	p := t.pending
	runner, ok := t.session.(driver.Runner)
	if !ok || !p.waits() {
		return nil
	}
	send, marks := p.statements, p.unmarked > 0
	if marks {
		send = append(send, driver.Statement{SQL: setMark, Args: []any{strconv.Itoa(p.stretch())}})
	}
	if err := runner.Run(ctx, send); err != nil {
		return t.record(fmt.Errorf("txretry: deferred statement: %w", err))
	}
	if t.session.State() == driver.Idle {
		return because("a deferred statement ended the transaction", ErrManaged, nil)
	}
	p.statements, p.unmarked, p.marked = nil, 0, p.marked || marks
	p.gone = append(p.gone, marks)
	return nil
}

// flushUnseen is flush where the user may send statements that are not seen here. If what waits cannot be
// sent, the transaction must not commit.
func (t *transaction) flushUnseen() {
	if t.session.State() != driver.Failed {
		err := t.flush(&t.ctx)
		if err == nil {
			return
		}
		if t.session.State() != driver.Failed && t.broken == nil {
			t.broken = err
		}
	}
	t.pending.drop()
}

// restore goes back to what waited when a savepoint of a handle began: what has been sent since is undone.
func (t *transaction) restore(earlier pending) {
	p := t.pending
	p.statements, p.unmarked, p.gone = earlier.statements, earlier.unmarked, earlier.gone
	if p.exposed {
		t.flushUnseen()
	}
}

// expose is called when the user gets the bare connection, or the transaction of database/sql on it.
func (t *transaction) expose() {
	if _, ok := t.session.(driver.Runner); ok && !t.pending.exposed {
		t.flushUnseen()
		t.pending.exposed = true
	}
}
