package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// near is the part of a limit that is left where it counts as near its edge.
const near = 0.1

// Near says that little is left of the limit.
func (l limitState) Near() bool { return float64(l.Remaining) <= near*float64(l.Max) }

// claimsStatus are the idempotency keys that are in flight.
type claimsStatus struct {
	Part     string `json:"part"`
	InFlight int    `json:"in_flight"`
	// Estimated says that the part has more keys than it went through.
	Estimated bool   `json:"estimated,omitempty"`
	Error     string `json:"error,omitempty"`
	hidden    bool   // the program has no right to count them, or its client no way
}

// Count is how many are in flight.
func (c claimsStatus) Count() string {
	if c.Estimated {
		return fmt.Sprintf("~%d", c.InFlight)
	}
	return fmt.Sprint(c.InFlight)
}

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

// connectionsStatus are the connections to a server.
type connectionsStatus struct {
	Server string        `json:"server"`
	Most   int           `json:"most"` // that the server takes; 0: it does not tell
	Open   int           `json:"open"`
	Roles  []Connections `json:"roles"`
	Error  string        `json:"error,omitempty"`
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

// counting is a part that tells how many claims are in flight, and whether it has counted all.
type counting interface {
	InFlight(ctx context.Context) (n int, exact bool, err error)
}

const (
	// countRest is for how many times as long as a count of claims took none follows: Redis goes through its keys for it, and
	// requests wait for the same Redis.
	countRest = 100
	// maxCountRest bounds that.
	maxCountRest = time.Minute
)

// claimsCount is the last count of a part's claims.
type claimsCount struct {
	mu   sync.Mutex
	last claimsStatus
	next time.Time // before which it is not counted anew
}

// lookAtLimits asks for the callers that the status shows, those first that have least left.
func (o *Operator) lookAtLimits(ctx context.Context) (states []limitState, failed []string) {
	states = []limitState{} // not null in JSON
	for _, l := range o.cfg.Limiters {
		for _, limit := range l.Limits {
			for _, key := range l.Keys {
				found, err := peek(ctx, l, limit, key)
				if err != nil {
					failed = append(failed, oneLine(err))
				}
				states = append(states, found...)
			}
		}
	}
	left := func(l limitState) float64 { return float64(l.Remaining) / float64(l.Max) }
	slices.SortStableFunc(states, func(a, b limitState) int { return cmp.Compare(left(a), left(b)) })
	return states, failed
}

// look counts the claims of a part, or tells the last count where that is young. On Redis a user may have no right to the
// commands that count, and a client may not know the nodes of its cluster.
func (c *claimsCount) look(ctx context.Context, p Part) claimsStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	began := time.Now()
	if began.Before(c.next) {
		return c.last
	}
	n, exact, err := p.Part.(counting).InFlight(ctx)
	hidden := redis.HasErrorPrefix(err, "NOPERM") || errors.Is(err, errors.ErrUnsupported)
	c.last = claimsStatus{p.Name, n, err == nil && !exact, textOf(err), hidden}
	if err == nil {
		ended := time.Now()
		c.next = ended.Add(min(countRest*ended.Sub(began), maxCountRest))
	}
	return c.last
}

func lookAtConnections(ctx context.Context, s Server) connectionsStatus {
	roles, most, err := s.Connections(ctx)
	c := connectionsStatus{Server: s.Name, Most: most, Roles: roles, Error: textOf(err)}
	for _, r := range roles {
		c.Open += r.Active + r.Waiting + r.Idle
	}
	return c
}

// counters are the parts that count claims.
func (o *Operator) counters() []Part {
	return slices.DeleteFunc(o.cfg.parts(), func(p Part) bool { _, ok := p.Part.(counting); return !ok })
}

// connected are the servers that tell their connections.
func (o *Operator) connected() []Server {
	return slices.DeleteFunc(slices.Clone(o.cfg.Servers), func(s Server) bool { return s.Connections == nil })
}

// Total is how many are open, of those that the server takes.
func (c connectionsStatus) Total() string {
	if c.Most == 0 {
		return fmt.Sprint(c.Open)
	}
	return fmt.Sprintf("%d of %d", c.Open, c.Most)
}

func sumUp(c Connections) string {
	return fmt.Sprintf("%d active, %d in a transaction, %d idle", c.Active, c.Waiting, c.Idle)
}
