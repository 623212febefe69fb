package txretry

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry/driver"
)

// rowSlack is how much of its time a row may lack: a deadline is not set anew for every row.
const rowSlack = 100 * time.Millisecond

// guard bounds how long the server may be silent on a connection. It uses the deadline of the
// connection itself: a context would make garbage at every statement.
type guard struct {
	conn     *pgx.Conn
	patience time.Duration // with a statement; 0: without end
	since    time.Time     // the beginning of the last wait
	until    time.Time     // the end of the present one; zero: there is none
	silent   bool          // the server did not answer in time
}

// expect starts a wait for the server that lasts up to d; 0 means without end.
func (g *guard) expect(d time.Duration) {
	g.since = time.Now()
	if d > 0 {
		g.until = g.since.Add(d)
		g.setDeadline(g.until)
	}
}

// expectMore grants the server as much time again, for the next part of its answer. When ctx has ended
// pgx has set a deadline of its own, which must not be lost.
func (g *guard) expectMore(ctx context.Context) {
	if g.patience == 0 || time.Until(g.until) > g.patience-rowSlack || g.conn.IsClosed() {
		return
	}
	g.expect(g.patience)
	if ctx.Err() != nil {
		g.setDeadline(time.Now())
	}
}

// answered ends a wait that came to err. The error then says whether it was the server's silence.
func (g *guard) answered(ctx context.Context, err error) error {
	if g.until.IsZero() {
		return err
	}
	late := err != nil && ctx.Err() == nil && !time.Now().Before(g.until)
	g.clear()
	if !late || !g.conn.IsClosed() {
		return err
	}
	g.silent = true
	return fmt.Errorf("%w: %w", driver.ErrSilent, err)
}

// clear leaves the connection without a deadline.
func (g *guard) clear() {
	if !g.until.IsZero() {
		g.until = time.Time{}
		g.setDeadline(time.Time{})
	}
}

// setDeadline leaves a closed connection alone: that has a deadline of pgx's own.
func (g *guard) setDeadline(at time.Time) {
	if pg := g.conn.PgConn(); !pg.IsClosed() {
		_ = pg.Conn().SetDeadline(at)
	}
}
