package pgcall

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

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
	try := func() (err error, silent bool) {
		bounded, cancel := context.WithTimeout(ctx, d)
		defer cancel()
		err = r.Use(bounded, fn)
		return err, err != nil && expired(bounded) && ctx.Err() == nil
	}
	err, silent := try()
	if silent {
		err, _ = try()
	}
	return err
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
