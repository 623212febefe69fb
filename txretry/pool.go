package txretry

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// farewell is how long a connection that was closed may take to tell the server so. pgx would take
// 15 s, in which the connection keeps its place in the pool.
const farewell = time.Second

// silence is how long a caller waits, and then leaves, for the idle connections to be looked at. Without
// that the next caller would get the next silent one.
const silence = 500 * time.Millisecond

// poolSource hands out the connections of a pool.
type poolSource struct{ pool *pgxpool.Pool }

// Pool makes it a driver.Pooler.
func (p poolSource) Pool() *pgxpool.Pool { return p.pool }

func (p poolSource) Acquire(ctx context.Context, limits driver.Limits) (driver.Session, error) {
	conn, err := p.acquire(ctx, limits)
	if err != nil {
		return nil, err
	}
	s := &pgSession{source: p, pooled: conn, limits: limits}
	s.guard = guard{conn: conn.Conn(), patience: limits.Statement}
	return s, nil
}

// acquire first waits for a short time: the pool pings a connection that was idle, and a ping that
// is not answered is given up then, or when the caller leaves, and the other idle connections are looked at.
func (p poolSource) acquire(ctx context.Context, limits driver.Limits) (*pgxpool.Conn, error) {
	start := time.Now()
	conn, err := p.acquireWithin(ctx, min(limits.Begin, limits.Acquire))
	waited := time.Since(start)
	if err != nil && ctx.Err() != nil && waited >= silence {
		go p.sweep(limits.Begin)
	}
	if left := limits.Acquire - waited; errors.Is(err, errNoConnection) && left > 0 {
		p.sweep(limits.Begin)
		conn, err = p.acquireWithin(ctx, left)
	}
	if errors.Is(err, errNoConnection) {
		stat := p.pool.Stat()
		err = fmt.Errorf("%w within %v: of %d connections %d are in use and %d are being opened or closed",
			err, limits.Acquire, stat.MaxConns(), stat.AcquiredConns(), stat.ConstructingConns())
	}
	return conn, err
}

var errNoConnection = errors.New("none became free")

func (p poolSource) acquireWithin(ctx context.Context, d time.Duration) (*pgxpool.Conn, error) {
	bounded, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	conn, err := p.pool.Acquire(bounded)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		return nil, errNoConnection
	}
	return conn, err
}

// put gives a connection back. One that is closed must not keep its place in the pool for long.
func (p poolSource) put(conn *pgxpool.Conn, silent bool) {
	pg := conn.Conn().PgConn()
	switch {
	case silent:
		_ = conn.Hijack()
		time.AfterFunc(farewell, func() { _ = pg.Conn().Close() })
	case pg.IsClosed():
		go func() {
			select {
			case <-pg.CleanupDone():
				conn.Release()
			case <-time.After(farewell):
				_ = conn.Hijack()
				_ = pg.Conn().Close()
			}
		}()
	default:
		conn.Release()
	}
}

// sweep pings all idle connections at once and closes those on which the server is silent: where there
// is one, there are often more, and each would cost a caller a wait.
func (p poolSource) sweep(patience time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	idle := p.pool.AcquireAllIdle(ctx)
	cancel()
	for _, conn := range idle {
		go func() {
			g := guard{conn: conn.Conn(), patience: patience}
			g.expect(patience)
			_ = g.answered(context.Background(), g.conn.Ping(context.Background()))
			p.put(conn, g.silent)
		}()
	}
}

// Fate implements driver.Source.
func (p poolSource) Fate(ctx context.Context, limits driver.Limits, xid string, begun time.Time) (driver.Outcome, error) {
	conn, err := p.acquire(ctx, limits)
	if err != nil {
		return driver.Unknown, err
	}
	g := guard{conn: conn.Conn(), patience: limits.Begin}
	defer func() { p.put(conn, g.silent) }()
	g.expect(limits.Begin)
	var status *string
	err = g.answered(ctx, g.conn.QueryRow(ctx, driver.AskFate, pgx.QueryExecModeExec, xid, driver.AgeOf(begun)).Scan(&status, nil))
	return driver.FateOf(status, sqlstate.Of(err), err)
}
