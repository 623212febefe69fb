package outboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/chunk"
	"github.com/holdfast-go/holdfast/outbox"
)

// ErrNotFound means that there is no dead letter with the id.
var ErrNotFound = errors.New("outboxpgx: no such dead letter")

// DeadLetter is a message that the relay gave up.
type DeadLetter struct {
	outbox.Message
	// Class and Err are those of the last attempt.
	Class outbox.Class
	Err   string
	// DiedAt is by the database's clock.
	DiedAt time.Time
}

// Filter chooses dead letters: those that meet every field that is set. The zero Filter is all of
// them.
type Filter struct {
	IDs   []uuid.UUID // nil: any
	Class outbox.Class
	Name  string
	Key   string
	// Error is a part of the text of the last attempt's error, in its case.
	Error string
	// OlderThan is the least time since the message was given up.
	OlderThan time.Duration
	// Limit is the most dead letters, the oldest first. 0 means 100 for List, and no limit else.
	// Count, Retry and Remove choose the same letters.
	Limit int
}

// DeadLetters shows and moves the dead letters of one outbox. It is safe for concurrent use.
type DeadLetters struct {
	pool *pgxpool.Pool
	sql  deadStatements
}

// NewDeadLetters returns the dead letters of the outbox at cfg.
func NewDeadLetters(pool *pgxpool.Pool, cfg SchemaConfig) (*DeadLetters, error) {
	t, err := cfg.tables()
	if pool == nil {
		err = errors.Join(err, errors.New("outboxpgx: NewDeadLetters needs a pool"))
	}
	if err != nil {
		return nil, err
	}
	return &DeadLetters{pool: pool, sql: t.deadStatements()}, nil
}

const listLimit = 100

// List returns dead letters, the oldest first.
func (d *DeadLetters) List(ctx context.Context, f Filter) ([]DeadLetter, error) {
	if f.Limit == 0 {
		f.Limit = listLimit
	}
	args, err := f.args()
	if err != nil {
		return nil, err
	}
	rows, _ := d.pool.Query(ctx, d.sql.list, args...) // CollectRows returns its error
	letters, err := pgx.CollectRows(rows, scanDeadLetter)
	if err != nil {
		return nil, fmt.Errorf("outboxpgx: list dead letters: %w", err)
	}
	return letters, nil
}

// Show returns one dead letter, or ErrNotFound.
func (d *DeadLetters) Show(ctx context.Context, id uuid.UUID) (DeadLetter, error) {
	letters, err := d.List(ctx, Filter{IDs: []uuid.UUID{id}})
	if err != nil {
		return DeadLetter{}, err
	}
	if len(letters) == 0 {
		return DeadLetter{}, ErrNotFound
	}
	return letters[0], nil
}

// Count returns how many dead letters the filter chooses: what Retry or Remove would do.
func (d *DeadLetters) Count(ctx context.Context, f Filter) (n int64, err error) {
	args, err := f.args()
	if err != nil {
		return 0, err
	}
	if err := d.pool.QueryRow(ctx, d.sql.count, args...).Scan(&n); err != nil {
		return 0, fmt.Errorf("outboxpgx: count dead letters: %w", err)
	}
	return n, nil
}

// RetryOptions change how dead letters are tried again. The zero value changes nothing.
type RetryOptions struct {
	// Spread has the letters leave evenly over this time, the oldest first, so that they do not
	// come all at once over whatever they failed at. Other messages of a key wait behind its
	// letter. 0: all at once.
	Spread time.Duration
	// To sends the letters elsewhere. Nil: where they were going.
	To *Destination
}

// Destination takes the place of a message's Transport and Route.
type Destination struct {
	Transport string
	Route     outbox.Route
}

// Retry moves dead letters back into the outbox, behind all its messages, with their attempts
// forgotten, and returns how many. They have lost their place in the order of their key. All move
// or none, but for those whose id the outbox holds again: they stay.
func (d *DeadLetters) Retry(ctx context.Context, f Filter) (int64, error) {
	return d.RetryWith(ctx, f, RetryOptions{})
}

// RetryWith is Retry with options. A destination that no message may have is refused with
// *outbox.MessageError.
func (d *DeadLetters) RetryWith(ctx context.Context, f Filter, o RetryOptions) (int64, error) {
	if o.Spread < 0 {
		return 0, fmt.Errorf("outboxpgx: RetryOptions.Spread is %v, want 0 or more", o.Spread)
	}
	var to Destination
	if o.To != nil {
		to = *o.To
	}
	trial := outbox.Message{Name: "trial", Body: []byte("0"), Transport: to.Transport, Route: to.Route}
	if _, err := outbox.Prepare(ctx, []outbox.Message{trial}, 0); err != nil {
		return 0, err
	}
	headers, err := encodeHeaders(to.Route.Headers)
	if err != nil {
		return 0, err
	}
	return d.exec(ctx, "retry", d.sql.retry, f,
		o.Spread.Microseconds(), o.To != nil, to.Transport, to.Route.Exchange, to.Route.RoutingKey, headers)
}

// Remove deletes dead letters for good and returns how many.
func (d *DeadLetters) Remove(ctx context.Context, f Filter) (int64, error) {
	return d.exec(ctx, "remove", d.sql.remove, f)
}

func (d *DeadLetters) exec(ctx context.Context, what, sql string, f Filter, more ...any) (int64, error) {
	args, err := f.args()
	if err != nil {
		return 0, err
	}
	n, err := chunk.Exec(ctx, d.pool, sql, append(args, more...)...)
	if err != nil {
		return 0, fmt.Errorf("outboxpgx: %s dead letters: %w", what, err)
	}
	return n, nil
}

// args are the arguments of deadWhere.
func (f Filter) args() ([]any, error) {
	if f.Limit < 0 || f.OlderThan < 0 {
		return nil, fmt.Errorf("outboxpgx: Filter is negative: limit %d, older than %v", f.Limit, f.OlderThan)
	}
	var age *int64
	if f.OlderThan > 0 {
		us := f.OlderThan.Microseconds()
		age = &us
	}
	var limit *int
	if f.Limit > 0 {
		limit = &f.Limit
	}
	return []any{f.IDs, nullable(string(f.Class)), nullable(f.Name), nullable(f.Key), age, limit, nullable(f.Error)}, nil
}

func scanDeadLetter(row pgx.CollectableRow) (DeadLetter, error) {
	var d DeadLetter
	var key *string
	err := row.Scan(&d.ID, &d.Name, &d.Body, &d.ContentType, &d.Headers, &key, &d.Transport,
		&d.Route.Exchange, &d.Route.RoutingKey, &d.Route.Headers, &d.CreatedAt, &d.Attempts, &d.Class, &d.Err, &d.DiedAt)
	if key != nil {
		d.Key = *key
	}
	return d, err
}
