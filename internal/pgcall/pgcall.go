// Package pgcall bounds calls of a Postgres pool, and gets over connections on
// which the server has fallen silent, as behind a router that has forgotten them.
//
// Where one idle connection is silent there are often more, and each would cost
// somebody a wait. After a call that was not answered all that are idle are asked
// at once, and those that do not answer are closed.
package pgcall

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/breaker"
)

const (
	// answer is within which time a server answers that has nothing to do.
	answer = 2 * time.Second
	// farewell is how long a connection that was closed may take to tell the server so. pgx takes 15 s,
	// in which the connection would keep its place in the pool.
	farewell = time.Second
	// execTimeout bounds one Exec.
	execTimeout = 30 * time.Second
)

// ErrSilent means that a call was not answered in time. What it did is not known, unless it only read.
var ErrSilent = breaker.ErrSilent

// Use runs fn on a connection of the pool. Nothing but the deadline of ctx bounds fn.
func Use(ctx context.Context, pool *pgxpool.Pool, fn func(context.Context, *pgxpool.Conn) error) error {
	return use(ctx, pool, false, fn)
}

// Within is Use for d at most, for calls that are rare: a connection must have answered just before,
// so that one that was silent already costs 2 s and not d. An error after d is ErrSilent.
func Within(ctx context.Context, pool *pgxpool.Pool, d time.Duration, fn func(context.Context, *pgxpool.Conn) error) error {
	return within(ctx, d, func(ctx context.Context) error { return use(ctx, pool, true, fn) })
}

// Twice is Within for what does no harm if it is done twice: it is tried on another connection after
// ErrSilent.
func Twice(ctx context.Context, pool *pgxpool.Pool, d time.Duration, fn func(context.Context, *pgxpool.Conn) error) error {
	return twice(ctx, d, func(ctx context.Context) error { return use(ctx, pool, true, fn) })
}

// Exec runs one statement in a transaction at READ COMMITTED, whatever the database's default, and
// returns how many rows it changed; with an error none. It has 30 s. It takes one round trip, so that
// no lock outlives a connection that falls silent.
func Exec(ctx context.Context, pool *pgxpool.Pool, sql string, args ...any) (n int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, execTimeout)
	defer cancel()
	err = Use(ctx, pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		queue := &pgx.Batch{}
		queue.Queue(`BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`)
		queue.Queue(sql, args...).Exec(func(tag pgconn.CommandTag) error {
			n = tag.RowsAffected()
			return nil
		})
		queue.Queue(`COMMIT`)
		return conn.SendBatch(ctx, queue).Close()
	})
	if err != nil {
		return 0, err
	}
	return n, nil
}

// Take takes a connection that has just answered out of the pool, for the caller to keep and close.
func Take(ctx context.Context, pool *pgxpool.Pool) (*pgx.Conn, error) {
	conn, err := acquire(ctx, pool, true)
	if err != nil {
		return nil, err
	}
	return conn.Hijack(), nil
}

func within(ctx context.Context, d time.Duration, call func(context.Context) error) error {
	bounded, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	err := call(bounded)
	if err != nil && expired(bounded) && ctx.Err() == nil {
		return fmt.Errorf("%w within %v: %w", ErrSilent, d, err)
	}
	return err
}

func twice(ctx context.Context, d time.Duration, call func(context.Context) error) error {
	err := within(ctx, d, call)
	if errors.Is(err, ErrSilent) {
		err = within(ctx, d, call)
	}
	return err
}

func use(ctx context.Context, pool *pgxpool.Pool, prove bool, fn func(context.Context, *pgxpool.Conn) error) error {
	conn, err := acquire(ctx, pool, prove)
	if err != nil {
		return err
	}
	defer Put(conn, true)
	err = fn(ctx, conn)
	if err != nil && expired(ctx) {
		Sweep(pool, answer)
	}
	return err
}

func expired(ctx context.Context) bool { return errors.Is(ctx.Err(), context.DeadlineExceeded) }

// acquire waits for a short time first: the pool asks a connection that was idle whether it works.
// Then it waits for longer, since each time its place in the queue for a busy pool is lost.
func acquire(ctx context.Context, pool *pgxpool.Pool, prove bool) (*pgxpool.Conn, error) {
	for wait := answer; ; wait *= 2 {
		conn, err := proven(ctx, pool, wait, prove)
		if err == nil || !errors.Is(err, errUnproven) || ctx.Err() != nil {
			return conn, err
		}
		Sweep(pool, answer)
	}
}

var errUnproven = errors.New("no connection that works")

func proven(ctx context.Context, pool *pgxpool.Pool, wait time.Duration, prove bool) (*pgxpool.Conn, error) {
	bounded, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	conn, err := pool.Acquire(bounded)
	if err != nil && expired(bounded) {
		return nil, fmt.Errorf("%w: %w", errUnproven, err)
	}
	if err != nil || !prove {
		return conn, err
	}
	if err := ping(ctx, conn, answer); err != nil {
		Put(conn, true)
		return nil, fmt.Errorf("%w: %w", errUnproven, err)
	}
	return conn, nil
}

// ping closes a connection that does not answer in time.
func ping(ctx context.Context, conn *pgxpool.Conn, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return conn.Ping(ctx)
}

// Put gives a connection back. One that is closed has a second to tell the server so, in which it keeps its
// place in the pool. With atOnce it leaves the pool before.
func Put(conn *pgxpool.Conn, atOnce bool) {
	pg := conn.Conn().PgConn()
	switch {
	case !pg.IsClosed():
		conn.Release()
	case atOnce:
		_ = conn.Hijack()
		HangUp(pg)
	default:
		go func() {
			select {
			case <-pg.CleanupDone():
				conn.Release()
			case <-time.After(farewell):
				_ = conn.Hijack()
				_ = pg.Conn().Close()
			}
		}()
	}
}

// HangUp gives a connection that is closed a second for its farewell.
func HangUp(pg *pgconn.PgConn) { time.AfterFunc(farewell, func() { _ = pg.Conn().Close() }) }

// Sweep asks all idle connections at once, without waiting for their answers, and closes those on which the server is
// silent for as long as patience.
func Sweep(pool *pgxpool.Pool, patience time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	idle := pool.AcquireAllIdle(ctx)
	cancel()
	for _, conn := range idle {
		go func() {
			defer Put(conn, true)
			_ = ping(context.Background(), conn, patience)
		}()
	}
}

// reserveIdle is how long a Reserve keeps a connection that nobody uses.
const reserveIdle = 15 * time.Second

// Reserve is one connection beside a pool. Leases are renewed over it: the work under them may hold every connection
// of the pool for longer than they last. It is opened when it is needed, as the pool opens its own, and closed after
// 15 s without use, also where the pool is closed before. BeforeConnect, AfterConnect and PrepareConn or BeforeAcquire of the
// pool's configuration are called as the pool calls them. Make it with NewReserve. It is safe for concurrent use; calls take
// turns.
type Reserve struct {
	pool    *pgxpool.Pool
	turn    chan struct{} // full while a call has its turn, which guards the fields below
	conn    *pgx.Conn     // nil: none is open
	prepare func(context.Context, *pgx.Conn) (bool, error)
	idle    *time.Timer
}

// NewReserve returns a Reserve that connects as the pool does.
func NewReserve(pool *pgxpool.Pool) *Reserve {
	return &Reserve{pool: pool, turn: make(chan struct{}, 1)}
}

// Use runs fn on the connection. Where none can be opened, since the server has no place for it, fn gets one of the
// pool. Nothing but the deadline of ctx bounds fn.
func (r *Reserve) Use(ctx context.Context, fn func(context.Context, *pgx.Conn) error) error {
	select {
	case r.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-r.turn }()
	if r.idle != nil {
		r.idle.Stop()
	}
	if err := r.open(ctx); err != nil {
		return r.usePool(ctx, err, fn)
	}
	err := fn(ctx, r.conn)
	if r.conn.PgConn().TxStatus() != 'I' { // fn has left a transaction open
		_ = r.conn.Close(ctx)
	}
	r.idle = time.AfterFunc(reserveIdle, r.close)
	return err
}

// Twice is Use for d at most for what does no harm if it is done twice: where the connection does not answer it is
// tried on a new one.
func (r *Reserve) Twice(ctx context.Context, d time.Duration, fn func(context.Context, *pgx.Conn) error) error {
	return twice(ctx, d, func(ctx context.Context) error { return r.Use(ctx, fn) })
}

// open prepares the connection that is open, or else a new one. A new one that is not accepted is an error.
func (r *Reserve) open(ctx context.Context) error {
	if r.conn != nil && !r.conn.IsClosed() {
		if ok, err := r.prepared(ctx); ok || err != nil {
			return err
		}
	}
	if err := r.connect(ctx); err != nil {
		return err
	}
	ok, err := r.prepared(ctx)
	if !ok && err == nil {
		err = errors.New("PrepareConn or BeforeAcquire of the pool rejected a new connection")
	}
	return err
}

// prepared asks the pool's configuration whether the connection may be used, and closes it if not.
func (r *Reserve) prepared(ctx context.Context) (ok bool, err error) {
	if r.prepare == nil {
		return true, nil
	}
	ok, err = r.prepare(ctx, r.conn)
	if !ok || err != nil {
		_ = r.conn.Close(ctx)
	}
	return ok, err
}

func (r *Reserve) connect(ctx context.Context) error {
	cfg := r.pool.Config()
	if cfg.BeforeConnect != nil {
		if err := cfg.BeforeConnect(ctx, cfg.ConnConfig); err != nil {
			return err
		}
	}
	conn, err := pgx.ConnectConfig(ctx, cfg.ConnConfig)
	if err != nil {
		return err
	}
	if cfg.AfterConnect != nil {
		if err := cfg.AfterConnect(ctx, conn); err != nil {
			_ = conn.Close(ctx)
			return err
		}
	}
	r.conn, r.prepare = conn, cfg.PrepareConn
	if before := cfg.BeforeAcquire; r.prepare == nil && before != nil { // the older form
		r.prepare = func(ctx context.Context, conn *pgx.Conn) (bool, error) { return before(ctx, conn), nil }
	}
	return nil
}

func (r *Reserve) usePool(ctx context.Context, refused error, fn func(context.Context, *pgx.Conn) error) error {
	acquired := false
	err := Use(ctx, r.pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		acquired = true
		return fn(ctx, conn.Conn())
	})
	if err != nil && !acquired {
		return errors.Join(err, refused)
	}
	return err
}

// close ends the connection, unless a call has its turn, which sets the time anew.
func (r *Reserve) close() {
	select {
	case r.turn <- struct{}{}:
	default:
		return
	}
	conn := r.conn
	r.conn = nil
	<-r.turn
	if conn != nil {
		ctx, cancel := context.WithTimeout(context.Background(), farewell)
		defer cancel()
		_ = conn.Close(ctx)
	}
}

// ErrIgnored means that Postgres accepted a statement of ours and did not change the row: a trigger, a rule or a
// row-level-security policy of the table dropped the change.
var ErrIgnored = errors.New("a trigger, rule or policy of the table dropped it; Check names it")

// Ignored returns an ErrIgnored that names the table and the change.
func Ignored(table, change string) error {
	return fmt.Errorf("table %s ignored %s: %w", table, change, ErrIgnored)
}

// noRow is what the statements of OneRow and Changed make the server say.
const noRow = "holdfast: no row was stored"

// OneRow returns a statement that runs an INSERT of one row and fails where the table stores none. It is for a
// statement that travels with COMMIT, whose count comes too late to be looked at.
func OneRow(insert string) string {
	return `WITH stored AS (` + insert + ` RETURNING 1)
		SELECT CASE count(*) WHEN 1 THEN 1 ELSE ('` + noRow + `' || count(*))::int END FROM stored`
}

// Changed returns the end of a statement that selects from one of its WITH queries, and fails if another one has changed
// nothing although the first has rows.
func Changed(rows, change string) string {
	return ` SELECT CASE WHEN EXISTS (SELECT FROM ` + change + `) THEN 1 ELSE ('` + noRow + `' || (SELECT count(*) FROM ` + change + `))::int END FROM ` + rows
}

// ExplainOneRow makes an ErrIgnored of the failure of a OneRow or a Changed, and returns every other error as it is.
func ExplainOneRow(table string, err error) error {
	answer, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || answer.Code != "22P02" || !strings.Contains(answer.Message, noRow) {
		return err
	}
	return fmt.Errorf("%w: %w", Ignored(table, "a new row"), err)
}
