package pgprune

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgcall"
)

// MaxCount bounds what Count counts of each statement.
const MaxCount = 100_000

// Count returns how many rows Prune would delete by now; no statement counts above MaxCount.
func (p *Pruner) Count(ctx context.Context) (total int, err error) {
	for _, s := range p.cfg.Statements {
		var n int
		err := pgcall.Within(ctx, p.cfg.Pool, stepTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
			return conn.QueryRow(ctx, s.countSQL(), s.args(MaxCount)...).Scan(&n)
		})
		if err != nil {
			return total, fmt.Errorf("%spgx: count what is due: %w", p.cfg.Core, p.cfg.Explain(err))
		}
		total += n
	}
	return total, nil
}
