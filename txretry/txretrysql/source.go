package txretrysql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry/driver"
)

// source hands out the connections of a *sql.DB.
type source struct {
	db   *sql.DB
	pool *pgxpool.Pool
}

// Pool makes it a driver.Pooler.
func (s source) Pool() *pgxpool.Pool { return s.pool }

var errNoConnection = errors.New("none became free")

func (s source) Acquire(ctx context.Context, limits driver.Limits) (driver.Session, error) {
	bounded, cancel := context.WithTimeout(ctx, limits.Acquire)
	defer cancel()
	conn, err := s.db.Conn(bounded)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		stat := s.db.Stats()
		return nil, fmt.Errorf("%w within %v: of %d connections at most (0: any number) %d are open and %d in use",
			errNoConnection, limits.Acquire, stat.MaxOpenConnections, stat.OpenConnections, stat.InUse)
	}
	if err != nil {
		return nil, answerOf(err, true)
	}
	return &session{conn: conn, limits: limits}, nil
}

// Fate implements driver.Source.
func (s source) Fate(ctx context.Context, limits driver.Limits, xid string, begun time.Time) (driver.Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, limits.Begin)
	defer cancel()
	var status *string
	var ended any
	err := s.db.QueryRowContext(ctx, driver.AskFate, xid, driver.AgeOf(begun)).Scan(&status, &ended)
	return driver.FateOf(status, sqlstate.Of(err), err)
}
