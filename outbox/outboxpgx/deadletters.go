package outboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// ErrNotFound means that there is no dead letter with the id.
var ErrNotFound = errors.New("outboxpgx: no such dead letter")

// DeadLetter is a message that the relay gave up.
type DeadLetter struct {
	driver.Message
	// Class and Err are those of the last attempt.
	Class driver.Class
	Err   string
	// Unreadable is why the Message is not complete: another program stored what is none, or the bodies
	// would be more than 32 MiB in one List. Nil: it is. Retry moves what is stored, not the Message.
	Unreadable error
	// DiedAt is by the database's clock.
	DiedAt time.Time
}

// Filter chooses dead letters: those that meet every field that is set. The zero Filter is all of
// them.
type Filter struct {
	IDs   []uuid.UUID // nil: any; at most 10,000
	Class driver.Class
	Name  string
	Key   string
	// Error is a part of the text of the last attempt's error, in its case; at most 1,000 bytes.
	Error string
	// OlderThan is the least time since the message was given up.
	OlderThan time.Duration
	// Limit is the most dead letters, the oldest first. 0 means 100 for List, and no limit else.
	// Count, Retry and Remove choose the same letters, but for those that Retry refuses for their age.
	Limit int
}

// DeadLetters shows and moves the dead letters of one outbox. It is safe for concurrent use. A read has
// 10 s, and 10 s more on another connection where the server was silent on the first; a change has a
// minute. The error after that is context.DeadlineExceeded.
type DeadLetters struct {
	pool *pgxpool.Pool
	t    tables
	sql  deadStatements

	readTimeout, changeTimeout time.Duration
}

func newDeadLetters(pool *pgxpool.Pool, t tables) *DeadLetters {
	return &DeadLetters{pool: pool, t: t, sql: t.deadStatements(), readTimeout: 10 * time.Second, changeTimeout: time.Minute}
}

// DeadLetters returns the dead letters of the outbox.
func (s *Store) DeadLetters() *DeadLetters { return s.dead }

const listLimit = 100

// listBytes bounds the bodies of one List together.
const listBytes = 32 << 20

// A filter is stored with the change that it chose.
const (
	maxFilterIDs  = 10_000
	maxFilterText = 1000
)

// List returns dead letters, the oldest first.
func (d *DeadLetters) List(ctx context.Context, f Filter) ([]DeadLetter, error) {
	if f.Limit == 0 {
		f.Limit = listLimit
	}
	args, err := f.args()
	if err != nil {
		return nil, err
	}
	var letters []DeadLetter
	err = pgcall.Twice(ctx, d.pool, d.readTimeout, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		rows, _ := conn.Query(ctx, d.sql.list, append(args, listBytes)...) // CollectRows returns its error
		letters, err = pgx.CollectRows(rows, scanDeadLetter)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("outboxpgx: list dead letters: %w", d.t.explain(err))
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
	err = pgcall.Twice(ctx, d.pool, d.readTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, d.sql.count, args...).Scan(&n)
	})
	if err != nil {
		return 0, fmt.Errorf("outboxpgx: count dead letters: %w", d.t.explain(err))
	}
	return n, nil
}

// args are the arguments of deadWhere.
func (f Filter) args() ([]any, error) {
	if err := f.validate(); err != nil {
		return nil, err
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
	var ids uuids // nil: any
	if f.IDs != nil {
		ids = make(uuids, len(f.IDs))
	}
	for i, id := range f.IDs {
		ids[i] = pgtype.UUID{Bytes: id, Valid: true}
	}
	return []any{ids, nullable(string(f.Class)), nullable(f.Name), nullable(f.Key), age, limit, nullable(f.Error)}, nil
}

func (f Filter) validate() error {
	var errs []error
	if f.Limit < 0 || f.OlderThan < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: Filter is negative: limit %d, older than %v", f.Limit, f.OlderThan))
	}
	if len(f.IDs) > maxFilterIDs {
		errs = append(errs, fmt.Errorf("outboxpgx: Filter.IDs has %d entries, at most %d are allowed", len(f.IDs), maxFilterIDs))
	}
	if max(len(f.Class), len(f.Name), len(f.Key), len(f.Error)) > maxFilterText {
		errs = append(errs, fmt.Errorf("outboxpgx: Filter has a text of more than %d bytes", maxFilterText))
	}
	return errors.Join(errs...)
}

func scanDeadLetter(row pgx.CollectableRow) (d DeadLetter, err error) {
	var r record
	if err := row.Scan(r.dest(&d.Class, &d.Err, &d.DiedAt)...); err != nil {
		return d, err
	}
	d.Message, d.Unreadable = r.message()
	return d, nil
}
