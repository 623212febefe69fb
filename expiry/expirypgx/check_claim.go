package expirypgx

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/holdfast-go/holdfast/expiry"
)

const mendClaim = "correct Config.Claim: a query for one column, the id, with $1 as its LIMIT and id <> ALL($2)"

// checkClaim has the server read Config.Claim as it stands, without running it.
func (s *Store) checkClaim(ctx context.Context, conn *pgx.Conn) ([]expiry.Finding, error) {
	if s.cfg.Claim == "" {
		return nil, nil
	}
	stmt, err := conn.Prepare(ctx, "", s.sql.tryClaim)
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok && slices.Contains(notUnderstood, refused.Code[:min(2, len(refused.Code))]) {
		return []expiry.Finding{finding("Config.Claim is refused: "+refused.Message, mendClaim)}, nil
	}
	if err != nil {
		return nil, err
	}
	if problem := wrongParameters(conn.TypeMap(), stmt.ParamOIDs); problem != "" {
		return []expiry.Finding{finding("Config.Claim "+problem, mendClaim)}, nil
	}
	return nil, nil
}

// notUnderstood are the SQLSTATE classes of what is wrong with a statement itself:
// unsupported features, data, syntax and names.
var notUnderstood = []string{"0A", "22", "42"}

func wrongParameters(types *pgtype.Map, oids []uint32) string {
	if len(oids) != 2 {
		return fmt.Sprintf("has %d parameters", len(oids))
	}
	if !slices.Contains([]uint32{pgtype.Int2OID, pgtype.Int4OID, pgtype.Int8OID}, oids[0]) {
		return "takes $1, the number of rows, for something else"
	}
	ids, known := types.TypeForOID(oids[1])
	if !known {
		return ""
	}
	if _, array := ids.Codec.(*pgtype.ArrayCodec); !array {
		return "takes $2, the array of ids to leave alone, for one " + ids.Name
	}
	return ""
}
