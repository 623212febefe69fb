package txretry

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// AfterCommit registers fn to run once after the transaction of tx has definitely committed. fn runs on the goroutine
// that called Do, before Do returns, after the connection was released. fn is dropped if the transaction or the
// savepoint of the registration rolls back, or if the outcome of COMMIT is unknown. Functions run in the order of
// registration. If one panics, Do panics although the transaction has committed, and the later functions do not run.
//
// The savepoint may come from tx.Begin or from a statement in any form, like those of GORM, bun or ent. For the
// latter, Postgres keeps a mark. It costs a round trip before the next statement that is not plain: see [AtCommit].
// RESET ALL deletes the marks, so the functions registered before it do not run. The same is true for a COMMIT
// without a reply that is found committed later.
//
// If tx.Conn or txretrysql.Tx was called, close rows before calling AfterCommit, because the mark needs the
// connection. If rows are open, the transaction is rolled back, and Do returns "conn busy".
//
// It returns false, and does nothing, if tx is not an open handle of a Manager.
func AfterCommit(tx pgx.Tx, fn func()) bool {
	h, ok := tx.(interface{ AfterCommit(fn func()) bool })
	return ok && h.AfterCommit(fn)
}

// AtCommit defers one statement and sends it together with COMMIT, in one round trip. Use it for a write whose result
// nobody reads and that no later statement of the transaction needs to see. If it fails, nothing commits, and Do
// returns its error (or retries it, like any other). args are kept until then and must not be changed. If sql ends
// the transaction itself, the outcome is unknown.
//
// The statement belongs to the savepoint, the role and the search_path at the call. It is therefore sent earlier, in
// a separate round trip, before any statement that could change these: any statement that is not plainly a single
// SELECT, INSERT, UPDATE, DELETE, MERGE, VALUES, TABLE or WITH, or that calls set_config. That statement then returns
// the error of the deferred one. (A function that changes such a setting inside a SELECT is not recognised.)
//
// It returns false, and does nothing, if tx is not an open handle of a Manager. It also returns false after a call of
// tx.Conn or txretrysql.Tx, because the manager does not see statements on these. The caller then runs the statement
// itself.
func AtCommit(tx pgx.Tx, sql string, args ...any) bool {
	h, ok := tx.(interface {
		AtCommit(sql string, args ...any) bool
	})
	return ok && h.AtCommit(sql, args...)
}

// pending holds the deferred statements of a transaction, and the functions that run after its COMMIT.
//
// A savepoint may roll back a part of the transaction, and the user may have created it by a statement in any form,
// like GORM, bun and ent. Nothing is therefore deferred across a statement that could create or end a savepoint, or
// change the role or the search path. Before such a statement the deferred statements are sent, and from then on the
// server undoes them itself. A function cannot be sent, but a mark for it can: a setting that Postgres rolls back
// like a row. COMMIT reads the marks, and a function whose mark is gone does not run.
//
// A stretch is the part of a transaction between two such statements. It has one mark. Savepoints of handles need no
// mark: see restore.
type pending struct {
	statements []driver.Statement
	unmarked   int  // functions of the current stretch, whose mark has not been sent
	marked     bool // a mark has been sent

	// gone has an element for each ended stretch. True means that the stretch's functions do not run. For a stretch
	// with a mark, it is true until COMMIT has read the mark.
	gone []bool

	// exposed is set when the user has the bare connection: the manager does not see its statements, so nothing is
	// deferred.
	exposed bool
	// anyText is set when the name of a prepared statement looks like another kind of statement.
	anyText bool
}

// hook is a function that runs after COMMIT.
type hook struct {
	fn      func()
	stretch int  // the stretch of its registration
	hint    bool // it may run although its savepoint was rolled back
}

func (h *handle) AfterCommit(fn func()) bool {
	if h.closed() {
		return false
	}
	t := h.t
	if fn == nil || t.doomed() {
		return true
	}
	t.afterCommit = append(t.afterCommit, hook{fn: fn, stretch: t.pending.stretch()})
	t.pending.unmarked++
	if t.pending.exposed {
		t.flushUnseen()
	}
	return true
}

// HintAfterCommit implements driver.Hint.
func (h *handle) HintAfterCommit(fn func()) bool {
	if h.closed() {
		return false
	}
	h.t.afterCommit = append(h.t.afterCommit, hook{fn: fn, hint: true})
	return true
}

func (h *handle) AtCommit(sql string, args ...any) bool {
	return h.AtCommitExplained(nil, sql, args...)
}

// AtCommitExplained is like AtCommit, for a caller that can improve the error of COMMIT.
func (h *handle) AtCommitExplained(explain func(error) error, sql string, args ...any) bool {
	if h.closed() || h.t.pending.exposed {
		return false
	}
	if h.t.doomed() {
		return true
	}
	h.t.pending.statements = append(h.t.pending.statements, driver.Statement{SQL: sql, Args: args, Explain: explain})
	return true
}

// EffectAtCommit is the AtCommit of txretrytest.
func (h *handle) EffectAtCommit(e driver.Effect) bool {
	if h.closed() {
		return false
	}
	if !h.t.doomed() {
		h.t.pending.statements = append(h.t.pending.statements, driver.Statement{Effect: &e})
	}
	return true
}

func (p *pending) stretch() int { return len(p.gone) }

// runs reports whether a hook's registration is part of the committed transaction.
func (p *pending) runs(h hook) bool { return h.hint || h.stretch >= len(p.gone) || !p.gone[h.stretch] }

func (p *pending) waits() bool { return len(p.statements) > 0 || p.unmarked > 0 }

// drop ends the stretch and drops its work, because the server rolls the stretch back.
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

// atCommit returns the statements to send with COMMIT.
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

// doomed reports whether a statement has failed. All work until the next rollback is then rolled back too.
func (t *transaction) doomed() bool {
	t.settle()
	return t.session.State() == driver.Failed
}

// before prepares the transaction for a statement. tame reports whether the statement is plain: see isPlain.
func (t *transaction) before(ctx context.Context, tame func() bool) error {
	p := t.pending
	if !p.waits() {
		return nil
	}
	if t.session.State() == driver.Failed {
		// Only a rollback can follow: of the transaction, to a savepoint of a handle, or to another savepoint. That
		// savepoint is older than the pending work, because nothing is deferred across the statement that creates
		// one.
		p.drop()
		return nil
	}
	if !p.anyText && tame() {
		return nil
	}
	return t.flush(ctx)
}

// flush sends the deferred work, and ends the stretch.
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

// flushUnseen is like flush, for users who may send statements that the manager does not see. If the deferred work
// cannot be sent, the transaction must not commit.
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

// restore returns to the deferred work at the start of a handle's savepoint. The server undoes the work sent since
// then.
func (t *transaction) restore(earlier pending) {
	p := t.pending
	p.statements, p.unmarked, p.gone = earlier.statements, earlier.unmarked, earlier.gone
	if p.exposed {
		t.flushUnseen()
	}
}

// expose is called when the user gets the bare connection, or its database/sql transaction.
func (t *transaction) expose() {
	if _, ok := t.session.(driver.Runner); ok && !t.pending.exposed {
		t.flushUnseen()
		t.pending.exposed = true
	}
}

// runAfterCommit runs the functions registered by fn, if the transaction has committed.
func (c *call) runAfterCommit() {
	if c.last == nil || c.outcome != driver.Committed {
		return
	}
	for _, h := range c.last.afterCommit {
		if c.last.pending.runs(h) {
			h.fn()
		}
	}
}

// plainVerbs are the first words of statements that read and write rows. None of these statements can create or end a
// savepoint.
var plainVerbs = map[string]bool{
	"select": true, "insert": true, "update": true, "delete": true, "merge": true, "with": true, "values": true, "table": true,
}

// isPlain reports whether the text is certainly one statement that reads or writes rows. It returns false for
// unrecognised texts, which cost at most a round trip: the name of a prepared statement, a text with a semicolon in
// it, a user's rewriter, or a query that changes a setting.
func isPlain(sql string, args []any) bool {
	if !plainArgs(args) {
		return false
	}
	sql = strings.TrimRight(withoutComments(sql), "; \t\r\n\f\v")
	end := strings.IndexFunc(sql, func(r rune) bool { return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') })
	if end < 0 || !strings.ContainsRune(" \t\r\n\f*('", rune(sql[end])) || !plainVerbs[strings.ToLower(sql[:end])] {
		return false
	}
	return strings.IndexByte(sql, ';') < 0 && !containsFold(sql, "set_config") && !containsFold(sql, "pg_settings")
}

func isPlainBatch(b *pgx.Batch) bool {
	for _, q := range b.QueuedQueries {
		if !isPlain(q.SQL, q.Arguments) {
			return false
		}
	}
	return true
}

// plainArgs reports whether no argument can change the text.
func plainArgs(args []any) bool {
	for _, arg := range args {
		switch arg.(type) {
		case pgx.NamedArgs, pgx.StrictNamedArgs:
		case pgx.QueryRewriter:
			return false
		}
	}
	return true
}

// withoutComments returns the text from its first word on, or "" if a comment does not end. Comments in Postgres can
// nest.
func withoutComments(sql string) string {
	for {
		sql = strings.TrimLeft(sql, " \t\r\n\f\v")
		switch {
		case strings.HasPrefix(sql, "--"):
			end := strings.IndexAny(sql, "\r\n")
			if end < 0 {
				return ""
			}
			sql = sql[end:]
		case strings.HasPrefix(sql, "/*"):
			end := commentEnd(sql)
			if end < 0 {
				return ""
			}
			sql = sql[end:]
		default:
			return sql
		}
	}
}

// commentEnd returns the end of the comment at the start of the text, or -1.
func commentEnd(sql string) int {
	depth := 0
	for i := 0; i+1 < len(sql); i++ {
		switch sql[i : i+2] {
		case "/*":
			depth++
			i++
		case "*/":
			depth--
			i++
			if depth == 0 {
				return i + 1
			}
		}
	}
	return -1
}

// containsFold reports whether sql contains the word, ignoring case.
func containsFold(sql, word string) bool {
	for i := 0; i+len(word) <= len(sql); i++ {
		if sql[i]|0x20 == word[0] && strings.EqualFold(sql[i:i+len(word)], word) {
			return true
		}
	}
	return false
}
