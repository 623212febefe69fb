package txretry

import (
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// PreparePool fills in what a pool needs to get over connections on which the
// server has fallen silent, as behind a router that has forgotten them, and
// which the defaults of pgxpool do not bound:
//
//   - ConnConfig.ConnectTimeout is 5 s if it is 0, which means 2 minutes;
//   - PingTimeout is 2 s if it is 0, which means no bound;
//   - BeforeClose, after what it does already, leaves a connection that was given
//     up a second for its farewell: pgx takes 15, in which the connection keeps
//     its place in the pool, and Pool.Close waits.
//
// A [Manager] works on any pool, but on one that is not prepared it may need 20 s
// to get over the loss of all connections at once. [Manager.Check] tells.
func PreparePool(cfg *pgxpool.Config) {
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = 5 * time.Second
	}
	if cfg.PingTimeout == 0 {
		cfg.PingTimeout = 2 * time.Second
	}
	before := cfg.BeforeClose
	cfg.BeforeClose = func(conn *pgx.Conn) {
		if before != nil {
			before(conn)
		}
		if pg := conn.PgConn(); pg.IsClosed() {
			time.AfterFunc(farewell, func() { _ = pg.Conn().Close() })
		}
	}
}
