package txretrysql

import (
	"context"
	"database/sql"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// rows is the result of a query.
type rows struct {
	b      *bridge
	rows   *sql.Rows // nil: there is nothing but err
	cancel context.CancelFunc
	err    error
}

func (r *rows) Next() bool {
	if r.rows == nil || r.err != nil {
		return false
	}
	if r.rows.Next() {
		return true
	}
	r.Close()
	return false
}

// Scan takes the destinations of database/sql, sql.Scanners included. Like pgx's it closes the rows when it
// fails.
func (r *rows) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	places := slices.Clone(dest)
	for i, to := range dest {
		if scanner, ok := to.(sql.Scanner); ok {
			places[i] = textual{scanner}
		}
	}
	if err := r.rows.Scan(places...); err != nil {
		r.err = err
		r.Close()
	}
	return r.err
}

// textual gives a Scanner of pgx the text that it understands, where a driver has it as bytes.
type textual struct{ sql.Scanner }

func (t textual) Scan(value any) error {
	err := t.Scanner.Scan(value)
	if text, ok := value.([]byte); ok && err != nil {
		return t.Scanner.Scan(string(text))
	}
	return err
}

func (r *rows) Close() {
	if r.rows == nil {
		return
	}
	closing := r.rows.Close()
	err := r.rows.Err()
	if err == nil {
		err = closing
	}
	r.cancel()
	if err = r.b.answer(err); r.err == nil {
		r.err = err
	}
	r.rows = nil
}

func (r *rows) Err() error { return r.err }

// FieldDescriptions has the names only.
func (r *rows) FieldDescriptions() []pgconn.FieldDescription {
	if r.rows == nil {
		return nil
	}
	names, _ := r.rows.Columns() // fails on closed rows only
	fields := make([]pgconn.FieldDescription, len(names))
	for i, name := range names {
		fields[i].Name = name
	}
	return fields
}

func (r *rows) Values() ([]any, error) {
	values := make([]any, len(r.FieldDescriptions()))
	places := make([]any, len(values))
	for i := range values {
		places[i] = &values[i]
	}
	return values, r.Scan(places...)
}

func (r *rows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }
func (r *rows) RawValues() [][]byte           { return nil }
func (r *rows) Conn() *pgx.Conn               { return nil }
func (r *rows) TypeMap() *pgtype.Map          { return pgtype.NewMap() }

// row is the first one of a query.
type row struct{ rows pgx.Rows }

func (r row) Scan(dest ...any) error {
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// results runs what is left of a batch.
type results struct {
	ctx  context.Context
	b    *bridge
	left []*pgx.QueuedQuery
	err  error
}

func (r *results) next() (q *pgx.QueuedQuery, ok bool) {
	if r.err != nil || len(r.left) == 0 {
		return nil, false
	}
	q, r.left = r.left[0], r.left[1:]
	return q, true
}

func (r *results) Exec() (tag pgconn.CommandTag, err error) {
	q, ok := r.next()
	if !ok {
		return tag, r.over()
	}
	tag, r.err = r.b.Exec(r.ctx, q.SQL, q.Arguments...)
	return tag, r.err
}

func (r *results) Query() (found pgx.Rows, err error) {
	q, ok := r.next()
	if !ok {
		err := r.over()
		return &rows{err: err}, err
	}
	found, r.err = r.b.Query(r.ctx, q.SQL, q.Arguments...)
	return found, r.err
}

func (r *results) QueryRow() pgx.Row {
	found, _ := r.Query() // its error is in the rows
	return row{found}
}

func (r *results) over() error {
	if r.err != nil {
		return r.err
	}
	return pgx.ErrNoRows
}

func (r *results) Close() error {
	for len(r.left) > 0 && r.err == nil {
		if fn := r.left[0].Fn; fn != nil {
			if err := fn(r); err != nil && r.err == nil {
				r.err = err
			}
			continue
		}
		_, r.err = r.Exec()
	}
	return r.err
}

func (r *results) Tx() pgx.Tx { return refusing(pgx.ErrTxClosed) }
