package outboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/outbox"
)

// RetryOptions say who tries dead letters again, and how.
type RetryOptions struct {
	// By names who asks for it, and is required: 1 to 128 bytes. Reason may say why, in at most
	// 1,000 bytes. Both are UTF-8 without control characters, and are kept: see Store.Audit.
	By, Reason string
	// Spread has the letters leave evenly over this time, in their stored order, so that they do
	// not come all at once over whatever they failed at. Other messages of a key wait behind its
	// letter. 0: all at once.
	Spread time.Duration
	// To sends the letters elsewhere. Nil: where they were going.
	To *Destination
	// Retention is how long the consumers remember what they have processed. A letter may have been
	// published after all, its confirm lost on the way, or its relay; when it was stored longer ago than
	// this, its second effect would not be noticed, so it is refused. 0 means 8 days.
	Retention time.Duration
	// Force retries those, too.
	Force bool
}

// ErrOutlived is in the error of a Retry that left dead letters where they are because nobody remembers
// any more whether they were processed; see RetryOptions.Force. The others were retried.
var ErrOutlived = errors.New("outboxpgx: dead letters are older than what processed messages are remembered for")

const defaultRetention = 8 * 24 * time.Hour

// RemoveOptions say who removes dead letters.
type RemoveOptions struct {
	// By and Reason are as in RetryOptions.
	By, Reason string
}

// Destination takes the place of a message's Transport and Route.
type Destination struct {
	Transport string
	Route     outbox.Route
}

// Retry moves dead letters back into the outbox with their attempts forgotten, and returns how many.
// Where the server did not answer, it is not known whether they moved: calling again does no harm.
// All move or none, but for those whose id the outbox holds again and those that are too old, with
// ErrOutlived: they stay. A destination that no
// message may have is refused with *outbox.MessageError.
//
// The letters of one call keep the order in which they were stored, also within a key. They come
// behind all messages that the outbox holds at that time, those of their own key included, and before
// those that are written later: a letter has lost the place in its key that it once had.
func (d *DeadLetters) Retry(ctx context.Context, f Filter, o RetryOptions) (int64, error) {
	err := checkActor("RetryOptions", o.By, o.Reason)
	if o.Spread < 0 {
		err = errors.Join(err, fmt.Errorf("outboxpgx: RetryOptions.Spread is %v, want 0 or more", o.Spread))
	}
	if o.Retention < 0 {
		err = errors.Join(err, fmt.Errorf("outboxpgx: RetryOptions.Retention is %v, want 0 or more", o.Retention))
	}
	var to Destination
	if o.To != nil {
		to = *o.To
	}
	trial := outbox.Message{Name: "trial", Body: []byte("0"), Transport: to.Transport, Route: to.Route}
	_, refused := outbox.Prepare(ctx, []outbox.Message{trial}, 0)
	headers, err2 := encodeHeaders(to.Route.Headers)
	if err := errors.Join(err, refused, err2); err != nil {
		return 0, err
	}
	n, outlived, err := d.change(ctx, actionRetry, d.sql.retry, f, o.By, o.Reason,
		o.Spread.Microseconds(), o.To != nil, to.Transport, to.Route.Exchange, to.Route.RoutingKey, headers,
		cmp.Or(o.Retention, defaultRetention).Microseconds(), o.Force)
	if err == nil && outlived > 0 {
		err = fmt.Errorf("%d dead letters: %w", outlived, ErrOutlived)
	}
	return n, err
}

// Remove deletes dead letters for good and returns how many.
func (d *DeadLetters) Remove(ctx context.Context, f Filter, o RemoveOptions) (int64, error) {
	if err := checkActor("RemoveOptions", o.By, o.Reason); err != nil {
		return 0, err
	}
	n, _, err := d.change(ctx, actionRemove, d.sql.remove, f, o.By, o.Reason)
	return n, err
}

// change runs a statement that changes dead letters and notes who did so, in one round trip, so that
// no lock outlives a connection that falls silent.
func (d *DeadLetters) change(ctx context.Context, action, sql string, f Filter, by, reason string, more ...any) (n, outlived int64, err error) {
	args, err := f.args()
	if err != nil {
		return 0, 0, err
	}
	chosenBy, err := f.encode()
	if err != nil {
		return 0, 0, err
	}
	args = append(append(args, by, reason, chosenBy), more...)
	err = pgcall.Within(ctx, d.pool, d.changeTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		queue := &pgx.Batch{}
		queue.Queue(beginSQL)
		queue.Queue(sql, args...).QueryRow(func(row pgx.Row) error { return row.Scan(&n, &outlived) })
		queue.Queue(commitSQL)
		return conn.SendBatch(ctx, queue).Close()
	})
	if err != nil {
		return 0, 0, fmt.Errorf("outboxpgx: %s dead letters: %w", action, d.t.explain(err))
	}
	return n, outlived, nil
}

const (
	maxBy     = 128
	maxReason = 1000
)

func checkActor(where, by, reason string) error {
	var errs []error
	if by == "" || len(by) > maxBy || !plainText(by) {
		errs = append(errs, fmt.Errorf("outboxpgx: %s.By wants 1 to %d bytes of UTF-8 without control characters", where, maxBy))
	}
	if len(reason) > maxReason || !plainText(reason) {
		errs = append(errs, fmt.Errorf("outboxpgx: %s.Reason wants at most %d bytes of UTF-8 without control characters", where, maxReason))
	}
	return errors.Join(errs...)
}

func plainText(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}
