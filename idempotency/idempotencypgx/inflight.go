package idempotencypgx

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
)

// newest bounds how many rows InFlight reads.
const newest = 10_000

// InFlight returns how many claims are held now, of the 10,000 newest keys, and whether it is exact: there are fewer keys.
// Claims of a Gate are not among them. With Config.Records it is 0.
func (s *Store) InFlight(ctx context.Context) (n int, exact bool, err error) {
	if s.table == nil {
		return 0, true, nil
	}
	err = s.table.asker.ask(ctx, false, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, `SELECT count(*) FILTER (WHERE lease_until > clock_timestamp()), count(*) < $1
			FROM (SELECT lease_until FROM `+s.table.name+` ORDER BY expires_at DESC LIMIT $1) AS newest`, newest).Scan(&n, &exact)
	})
	if err != nil {
		return 0, false, fmt.Errorf("idempotencypgx: in flight: %w", err)
	}
	return n, exact, nil
}
