// Package pgcall bounds the calls of a Postgres pool and replaces silent connections, such as those that a router has
// dropped without a word to either side.
//
// If one idle connection is silent, others often are, and each would delay a call. So after a call without an answer,
// all idle connections are tested at once and the silent ones are closed.
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
	// answer is the time in which an idle server must answer.
	answer = 2 * time.Second
	// farewell bounds the closing of a connection, in which it keeps its place in the pool. pgx would take 15 s.
	farewell = time.Second
	// execTimeout bounds one Exec.
	execTimeout = 30 * time.Second
)

// ErrSilent means that a call was not answered in time. Unless the call only read, its outcome is unknown.
var ErrSilent = breaker.ErrSilent

// Use runs fn on a connection of the pool. Only the deadline of ctx bounds fn.
func Use(ctx context.Context, pool *pgxpool.Pool, fn func(context.Context, *pgxpool.Conn) error) error {
	return use(ctx, pool, false, fn)
}

// Within is Use with a limit of d, for rare calls. It tests the connection first, so that a silent one costs 2 s
// instead of d. An error after d is ErrSilent.
func Within(ctx context.Context, pool *pgxpool.Pool, d time.Duration, fn func(context.Context, *pgxpool.Conn) error) error {
	return within(ctx, d, func(ctx context.Context) error { return use(ctx, pool, true, fn) })
}

// Twice is Within for a call that may safely run twice: after ErrSilent it is retried on another connection.
func Twice(ctx context.Context, pool *pgxpool.Pool, d time.Duration, fn func(context.Context, *pgxpool.Conn) error) error {
	return twice(ctx, d, func(ctx context.Context) error { return use(ctx, pool, true, fn) })
}

// Exec runs one statement in a transaction at READ COMMITTED, whatever the database's default, and returns the number
// of changed rows, 0 with an error. Its limit is 30 s. It takes one round trip, so that no lock outlives a connection
// that falls silent.
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

// Take removes a connection that has just answered from the pool. The caller keeps and closes it.
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

// acquire waits briefly at first, because the pool tests connections that were idle. Then it waits longer each time,
// because every try loses its place in the queue of a busy pool.
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

// Put returns a connection to the pool. A closed connection keeps its place in the pool for up to a second, until the
// server knows of its end. With atOnce it leaves the pool immediately.
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

// HangUp cuts a closed connection off after a second.
func HangUp(pg *pgconn.PgConn) { time.AfterFunc(farewell, func() { _ = pg.Conn().Close() }) }

// Sweep tests all idle connections at once and closes those that do not answer within patience. It does not wait for
// the answers.
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

// reserveIdle is how long a Reserve keeps an unused connection.
const reserveIdle = 15 * time.Second

// Reserve is one connection beside a pool. Leases are renewed on it, because the work under the leases may hold every
// connection of the pool for longer than they last. It is opened when it is needed and closed after 15 s without use,
// even if the pool is closed earlier. It calls BeforeConnect, AfterConnect and PrepareConn or BeforeAcquire of the
// pool's configuration as the pool does. Make it with NewReserve. It is safe for concurrent use; calls take turns.
type Reserve struct {
	pool    *pgxpool.Pool
	turn    chan struct{} // full while a call has its turn; the turn guards the fields below
	conn    *pgx.Conn     // nil: none is open
	prepare func(context.Context, *pgx.Conn) (bool, error)
	idle    *time.Timer
}

// NewReserve returns a Reserve that connects as the pool does.
func NewReserve(pool *pgxpool.Pool) *Reserve {
	return &Reserve{pool: pool, turn: make(chan struct{}, 1)}
}

// Use runs fn on the connection. If none can be opened, for example because the server has reached its limit, fn gets
// a connection of the pool. Only the deadline of ctx bounds fn.
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

// Twice is Use with a limit of d, for a call that may safely run twice: if the connection does not answer, it is
// retried on a new one.
func (r *Reserve) Twice(ctx context.Context, d time.Duration, fn func(context.Context, *pgx.Conn) error) error {
	return twice(ctx, d, func(ctx context.Context) error { return r.Use(ctx, fn) })
}

// open prepares the open connection or a new one. It returns an error if the pool's configuration rejects a new one.
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
	if before := cfg.BeforeAcquire; r.prepare == nil && before != nil { // the older callback
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

// close ends the connection. It does nothing during a call, which starts the timer again.
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

// changeTries is how many times Changes runs a statement that changes nothing.
const changeTries = 5

// Changes runs a statement whose row count decides. If it changes no row although there is one to change, it runs again,
// because another session may have written the row since. In the end the table has ignored the change.
func Changes(statement func() (rows int64, err error), there func() (bool, error)) (ignored bool, err error) {
	for range changeTries {
		if rows, err := statement(); err != nil || rows > 0 {
			return false, err
		}
		if left, err := there(); err != nil || !left {
			return false, err
		}
	}
	return true, nil
}

// noRow is the server's error message when a statement of OneRow or Changed fails.
const noRow = "holdfast: no row was stored"

// OneRow returns a statement that runs an INSERT of one row and fails if the table stores no row. It is for a
// statement that is sent together with COMMIT: by the time its row count arrives, the transaction has committed.
func OneRow(insert string) string {
	return `WITH stored AS (` + insert + ` RETURNING 1)
		SELECT CASE count(*) WHEN 1 THEN 1 ELSE ('` + noRow + `' || count(*))::int END FROM stored`
}

// Changed returns the end of a statement that selects from the WITH query rows. It fails if the WITH query change has
// changed no row although rows is not empty.
func Changed(rows, change string) string {
	return ` SELECT CASE WHEN EXISTS (SELECT FROM ` + change + `) THEN 1 ELSE ('` + noRow + `' || (SELECT count(*) FROM ` + change + `))::int END FROM ` + rows
}

// ExplainOneRow turns the failure of OneRow or Changed into an ErrIgnored. It returns every other error unchanged.
func ExplainOneRow(table string, err error) error {
	answer, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || answer.Code != "22P02" || !strings.Contains(answer.Message, noRow) {
		return err
	}
	return fmt.Errorf("%w: %w", Ignored(table, "a new row"), err)
}
