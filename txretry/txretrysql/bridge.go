package txretrysql

import (
	"context"
	"database/sql"
	sqldriver "database/sql/driver"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// bridge is a pgx.Tx whose statements run in a *sql.Tx.
type bridge struct {
	tx       *sql.Tx
	patience time.Duration // the time limit of a statement; 0: none
	s        *session      // nil: the state of the connection is not tracked
}

// bounded returns a ctx that ends when the server has been silent for patience. Call answered at the end of the wait.
func (b *bridge) bounded(ctx context.Context) (_ context.Context, cancel context.CancelFunc, answered func(error) error) {
	ctx, cancel = context.WithCancel(ctx)
	if b.patience == 0 {
		return ctx, cancel, b.answer
	}
	timer := time.AfterFunc(b.patience, cancel)
	return ctx, cancel, func(err error) error {
		if !timer.Stop() && err != nil {
			err = fmt.Errorf("%w: %w", driver.ErrSilent, err)
		}
		return b.answer(err)
	}
}

// answer records the effect of an error on the transaction.
func (b *bridge) answer(err error) error {
	if b.s == nil {
		return answerOf(err, false)
	}
	return b.s.note(err)
}

func (b *bridge) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	args, err := plainArgs(args)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	ctx, cancel, answered := b.bounded(ctx)
	defer cancel()
	result, err := b.tx.ExecContext(ctx, query, args...)
	if err = answered(err); err != nil {
		return pgconn.CommandTag{}, err
	}
	n, err := result.RowsAffected()
	if err != nil { // the driver does not count rows
		return pgconn.CommandTag{}, nil
	}
	return pgconn.NewCommandTag("EXECUTE " + strconv.FormatInt(n, 10)), nil
}

func (b *bridge) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	args, err := plainArgs(args)
	if err != nil {
		return &rows{err: err}, err
	}
	ctx, cancel, answered := b.bounded(ctx)
	found, err := b.tx.QueryContext(ctx, query, args...)
	if err = answered(err); err != nil {
		cancel()
		return &rows{err: err}, err
	}
	return &rows{b: b, rows: found, cancel: cancel}, nil
}

func (b *bridge) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	found, _ := b.Query(ctx, query, args...) // the rows contain the error
	return row{found}
}

// SendBatch runs the statements one after the other, each when its result is requested.
func (b *bridge) SendBatch(ctx context.Context, queue *pgx.Batch) pgx.BatchResults {
	return &results{ctx: ctx, b: b, left: queue.QueuedQueries}
}

func (b *bridge) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, errNoCopy
}

func (b *bridge) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	return nil, errNoPrepare
}

// LargeObjects returns the LargeObjects of a transaction that rejects every call.
func (b *bridge) LargeObjects() pgx.LargeObjects { return refusing(errNoLargeObjects).LargeObjects() }

// Conn returns the connection below database/sql if the driver is pgx's, else nil.
func (b *bridge) Conn() *pgx.Conn {
	if b.s == nil {
		return nil
	}
	conn, _ := b.s.below()
	return conn
}

var (
	errNoCopy         = fmt.Errorf("txretrysql: COPY over database/sql: %w", errors.ErrUnsupported)
	errNoPrepare      = fmt.Errorf("txretrysql: Prepare on the handle; use the *sql.Tx: %w", errors.ErrUnsupported)
	errNoLargeObjects = fmt.Errorf("txretrysql: large objects over database/sql: %w", errors.ErrUnsupported)
)

func refusing(err error) pgx.Tx {
	var batch pgx.Batch
	batch.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(&batch, err).Tx()
}

// rows is the result of a query.
type rows struct {
	b      *bridge
	rows   *sql.Rows // nil: there is only err
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

// Scan accepts the destinations of database/sql, including sql.Scanners. Like pgx's Scan, it closes the rows when it
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

// textual passes text to a Scanner of pgx that does not accept the driver's bytes.
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

// FieldDescriptions returns the names only.
func (r *rows) FieldDescriptions() []pgconn.FieldDescription {
	if r.rows == nil {
		return nil
	}
	names, _ := r.rows.Columns() // fails only on closed rows
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

// row is the first row of a query.
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

// results runs the remaining statements of a batch.
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
	found, _ := r.Query() // the rows contain the error
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

// plainArgs returns arguments that every driver can pass. An argument that database/sql does not know is converted to
// its text form in Postgres.
func plainArgs(args []any) ([]any, error) {
	var plain []any
	for i, arg := range args {
		if isPlain(arg) {
			continue
		}
		text, err := textOf(arg)
		if err != nil {
			return nil, fmt.Errorf("txretrysql: argument %d: %w", i+1, err)
		}
		if plain == nil {
			plain = slices.Clone(args) // the caller's args stay unchanged
		}
		plain[i] = text
	}
	if plain == nil {
		return args, nil
	}
	return plain, nil
}

func isPlain(arg any) bool {
	switch arg := arg.(type) {
	case nil, string, *string, bool, time.Time, *time.Time, sqldriver.Valuer:
		return true
	case []byte: // some drivers treat nil as empty
		return arg != nil
	case time.Duration, *time.Duration: // an interval, not a number
		return false
	}
	switch kind := reflect.TypeOf(arg).Kind(); kind {
	case reflect.Slice:
		return reflect.TypeOf(arg).Elem().Kind() == reflect.Uint8
	case reflect.Array, reflect.Map, reflect.Struct:
		return false
	}
	return true
}

// textOf returns the text form of arg, or nil for NULL.
func textOf(arg any) (any, error) {
	types := pgtype.NewMap() // not safe for concurrent use
	known, ok := types.TypeForValue(arg)
	if !ok {
		return nil, fmt.Errorf("%T has no SQL form, convert it to text", arg)
	}
	text, err := types.Encode(known.OID, pgtype.TextFormatCode, arg, nil)
	if err != nil || text == nil {
		return nil, err
	}
	return string(text), nil
}

// serverError is a server error from a driver other than pgx's. Its tree also contains the error that pgx would have
// returned.
type serverError struct {
	err    error
	answer *pgconn.PgError
}

func (e *serverError) Error() string   { return e.err.Error() }
func (e *serverError) Unwrap() []error { return []error{e.err, e.answer} }

// answerOf converts an error to one of pgx's, for code that uses a pgx.Tx. If the connection is closed after the
// error, the error is FATAL.
func answerOf(err error, closed bool) error {
	code := sqlstate.Of(err)
	if code == "" {
		return err
	}
	if _, ok := errors.AsType[*pgconn.PgError](err); ok {
		return err
	}
	severity := "ERROR"
	if closed {
		severity = "FATAL"
	}
	return &serverError{err, &pgconn.PgError{Severity: severity, SeverityUnlocalized: severity, Code: code, Message: err.Error()}}
}
