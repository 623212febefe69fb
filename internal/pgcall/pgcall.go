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
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// answer is within which time a server answers that has nothing to do.
	answer = 2 * time.Second
	// farewell is how long a connection that was closed may take to tell the server so. pgx takes 15 s,
	// in which the connection would keep its place in the pool.
	farewell = time.Second
)

// ErrSilent means that a call was not answered in time. What it did is not known, unless it only read.
var ErrSilent = errors.New("the server does not answer")

// Use runs fn on a connection of the pool. Nothing but the deadline of ctx bounds fn.
func Use(ctx context.Context, pool *pgxpool.Pool, fn func(context.Context, *pgxpool.Conn) error) error {
	return use(ctx, pool, false, fn)
}

// Within is Use for d at most, for calls that are rare: a connection must have answered just before,
// so that one that was silent already costs 2 s and not d. An error after d is ErrSilent.
func Within(ctx context.Context, pool *pgxpool.Pool, d time.Duration, fn func(context.Context, *pgxpool.Conn) error) error {
	bounded, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	err := use(bounded, pool, true, fn)
	if err != nil && expired(bounded) && ctx.Err() == nil {
		return fmt.Errorf("%w within %v: %w", ErrSilent, d, err)
	}
	return err
}

// Twice is Within for what does no harm if it is done twice: it is tried on another connection after
// ErrSilent.
func Twice(ctx context.Context, pool *pgxpool.Pool, d time.Duration, fn func(context.Context, *pgxpool.Conn) error) error {
	err := Within(ctx, pool, d, fn)
	if errors.Is(err, ErrSilent) {
		err = Within(ctx, pool, d, fn)
	}
	return err
}

// Take takes a connection that has just answered out of the pool, for the caller to keep and close.
func Take(ctx context.Context, pool *pgxpool.Pool) (*pgx.Conn, error) {
	conn, err := acquire(ctx, pool, true)
	if err != nil {
		return nil, err
	}
	return conn.Hijack(), nil
}

func use(ctx context.Context, pool *pgxpool.Pool, prove bool, fn func(context.Context, *pgxpool.Conn) error) error {
	conn, err := acquire(ctx, pool, prove)
	if err != nil {
		return err
	}
	defer put(conn)
	err = fn(ctx, conn)
	if err != nil && expired(ctx) {
		sweep(pool)
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
		sweep(pool)
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
	short, cancelPing := context.WithTimeout(ctx, answer)
	defer cancelPing()
	if err := conn.Ping(short); err != nil {
		put(conn)
		return nil, fmt.Errorf("%w: %w", errUnproven, err)
	}
	return conn, nil
}

// put gives a connection back. One that is closed leaves the pool at once.
func put(conn *pgxpool.Conn) {
	pg := conn.Conn().PgConn()
	if !pg.IsClosed() {
		conn.Release()
		return
	}
	_ = conn.Hijack()
	time.AfterFunc(farewell, func() { _ = pg.Conn().Close() })
}

// sweep closes the idle connections that do not answer.
func sweep(pool *pgxpool.Pool) {
	ctx, cancel := context.WithTimeout(context.Background(), answer)
	idle := pool.AcquireAllIdle(ctx)
	cancel()
	for _, conn := range idle {
		go func() {
			defer put(conn)
			ctx, cancel := context.WithTimeout(context.Background(), answer)
			defer cancel()
			_ = conn.Ping(ctx) // it closes a connection that is silent
		}()
	}
}
