package idempotencypgx

import (
	"github.com/jackc/pgx/v5/pgxpool"

	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
)

// NewRecords returns the records in the default table.
func NewRecords(pool *pgxpool.Pool) pgxdriver.Records {
	return newTable(pool, `"`+defaultTable+`"`, defaultRetention)
}
