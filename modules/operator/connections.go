package operator

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Connections are those to a server of one role and program.
type Connections struct {
	// Role is the user of the server, and Program what the client says that it is.
	Role    string `json:"role"`
	Program string `json:"program"`
	// Active run a statement, Waiting are idle in a transaction, and Idle do nothing. See also RedisConnections.
	Active  int `json:"active"`
	Waiting int `json:"waiting"`
	Idle    int `json:"idle"`
}

// Connected tells the connections to a server, and how many it takes. A Connected is safe for concurrent use.
type Connected func(ctx context.Context) (roles []Connections, most int, err error)

// maxRoles is how many roles and programs of a server are told.
const maxRoles = 100

// PostgresConnections returns the Connected of the database of a pool. Without the rights of pg_read_all_stats it tells
// programs and states of the own role only.
func PostgresConnections(pool *pgxpool.Pool) Connected {
	const sql = `SELECT coalesce(usename, ''), coalesce(application_name, ''), count(*) FILTER (WHERE state = 'active'),
		count(*) FILTER (WHERE state LIKE 'idle in transaction%'), count(*) FILTER (WHERE state = 'idle' OR state IS NULL)
		FROM pg_stat_activity WHERE datname = current_database() GROUP BY 1, 2 ORDER BY count(*) DESC, 1, 2 LIMIT $1`
	return func(ctx context.Context) (roles []Connections, most int, err error) {
		rows, _ := pool.Query(ctx, sql, maxRoles) // CollectRows returns its error
		if roles, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Connections]); err != nil {
			return nil, 0, err
		}
		err = pool.QueryRow(ctx, `SELECT current_setting('max_connections')::int`).Scan(&most)
		return roles, most, err
	}
}

// RedisConnections returns the Connected of a Redis server, of a node where it is a cluster. List answers CLIENT LIST, as
// ClientList of a client does. Active clients wait for a blocking command, and waiting ones are in a MULTI. A server that
// forbids the command tells nothing. How many clients the server takes is not told.
func RedisConnections(list func(ctx context.Context) (string, error)) Connected {
	return func(ctx context.Context) ([]Connections, int, error) {
		answer, err := list(ctx)
		switch {
		case err != nil && strings.HasPrefix(err.Error(), "NOPERM"):
			return nil, 0, nil
		case err != nil:
			return nil, 0, err
		}
		return clientsByRole(answer), 0, nil
	}
}

// clientsByRole reads https://redis.io/docs/latest/commands/client-list/.
func clientsByRole(answer string) []Connections {
	type client struct{ role, program string }
	counts := map[client]*Connections{}
	for line := range strings.Lines(answer) {
		fields := map[string]string{}
		for field := range strings.FieldsSeq(line) {
			name, value, _ := strings.Cut(field, "=")
			fields[name] = value
		}
		who := client{fields["user"], cmp.Or(fields["name"], fields["lib-name"])}
		if counts[who] == nil {
			counts[who] = &Connections{Role: who.role, Program: who.program}
		}
		switch flags := fields["flags"]; {
		case strings.Contains(flags, "b"):
			counts[who].Active++
		case strings.Contains(flags, "x"):
			counts[who].Waiting++
		default:
			counts[who].Idle++
		}
	}
	var roles []Connections
	for _, c := range counts {
		roles = append(roles, *c)
	}
	open := func(c Connections) int { return c.Active + c.Waiting + c.Idle }
	slices.SortFunc(roles, func(a, b Connections) int {
		return cmp.Or(open(b)-open(a), strings.Compare(a.Role, b.Role), strings.Compare(a.Program, b.Program))
	})
	return roles[:min(len(roles), maxRoles)]
}
