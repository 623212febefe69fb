package txretry

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// guardedRows gives the server as much time for every row as for a statement. The caller may take
// as long as it likes between them.
type guardedRows struct {
	pgx.Rows
	ctx context.Context
	g   *guard
	err error // of Query, or that the server was silent
}

// Conn returns nil, as pgx.Rows may: the handle gives the connection away, and keeps track of that.
func (r *guardedRows) Conn() *pgx.Conn { return nil }

func (r *guardedRows) Next() bool {
	r.g.expectMore(r.ctx)
	if r.Rows.Next() {
		return true
	}
	r.ended()
	return false
}

func (r *guardedRows) Close() {
	r.g.expectMore(r.ctx)
	r.Rows.Close()
	r.ended()
}

func (r *guardedRows) ended() {
	if err := r.Rows.Err(); r.err == nil {
		r.err = r.g.answered(r.ctx, err)
	}
}

func (r *guardedRows) Err() error {
	if r.err != nil {
		return r.err
	}
	return r.Rows.Err()
}

// guardedRow is the one row of a QueryRow.
type guardedRow struct {
	pgx.Row
	ctx context.Context
	g   *guard
}

func (r *guardedRow) Scan(dest ...any) error {
	r.g.expectMore(r.ctx)
	return r.g.answered(r.ctx, r.Row.Scan(dest...))
}

// guardedResults gives the server as much time for every result that is asked for as for a
// statement; for all that are left when it is closed, as much once.
type guardedResults struct {
	pgx.BatchResults
	ctx context.Context
	g   *guard
}

func (b *guardedResults) Exec() (pgconn.CommandTag, error) {
	b.g.expectMore(b.ctx)
	tag, err := b.BatchResults.Exec()
	return tag, b.failed(err)
}

func (b *guardedResults) Query() (pgx.Rows, error) {
	b.g.expectMore(b.ctx)
	rows, err := b.BatchResults.Query()
	err = b.failed(err)
	return &guardedRows{rows, b.ctx, b.g, err}, err
}

func (b *guardedResults) QueryRow() pgx.Row {
	b.g.expectMore(b.ctx)
	return &guardedRow{b.BatchResults.QueryRow(), b.ctx, b.g}
}

func (b *guardedResults) Close() error {
	b.g.expectMore(b.ctx)
	return b.g.answered(b.ctx, b.BatchResults.Close())
}

// failed looks at the error of one result; without one, the wait is not over.
func (b *guardedResults) failed(err error) error {
	if err == nil {
		return nil
	}
	return b.g.answered(b.ctx, err)
}
