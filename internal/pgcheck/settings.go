package pgcheck

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
)

// Settings adds a finding for each setting of the connection with which pgx misreads values. Two of them matter only in the
// exec modes that read values as text, exec and simple_protocol.
func Settings(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	var bytea, dates, encoding string
	err := conn.QueryRow(ctx, `SELECT pg_catalog.current_setting('bytea_output'), pg_catalog.current_setting('DateStyle'), pg_catalog.current_setting('client_encoding')`).
		Scan(&bytea, &dates, &encoding)
	if err != nil {
		return err
	}
	if encoding != "UTF8" {
		found.Add("remove client_encoding from the connection string, or ALTER ROLE … SET client_encoding = 'UTF8'",
			"client_encoding is %s: pgx reads and writes UTF8", encoding)
	}
	mode := conn.Conn().Config().DefaultQueryExecMode
	if mode != pgx.QueryExecModeExec && mode != pgx.QueryExecModeSimpleProtocol {
		return nil
	}
	if bytea != "hex" {
		found.Add("ALTER ROLE … SET bytea_output = 'hex', or use another QueryExecMode",
			"bytea_output is %s: in the exec mode %q pgx cannot read it", bytea, mode)
	}
	if len(dates) < 3 || dates[:3] != "ISO" {
		found.Add("ALTER ROLE … SET DateStyle = 'ISO', or use another QueryExecMode",
			"DateStyle is %s: in the exec mode %q pgx cannot read it", dates, mode)
	}
	return nil
}
