package idempotencypgx

import (
	"github.com/jackc/pgx/v5/pgxpool"

	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
)

// NewRecords returns the records in the default table.
func NewRecords(pool *pgxpool.Pool) pgxdriver.Records {
	return newTable(pool, `"`+defaultTable+`"`, defaultRetention)
}

// PruneSQL deletes due rows from the default table. $1 limit, $2 rows to skip.
func PruneSQL() string {
	return newTable(nil, `"`+defaultTable+`"`, defaultRetention).due().DeleteSQL()
}
