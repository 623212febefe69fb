// Package operator describes a service built on Holdfast to its operators. A [Config] lists its outboxes, consumers,
// sweeps and limits. Three packages show their state, find dead letters, retry or drop them, and run by hand the work
// that services do in the background:
//
//   - page, a web page;
//   - command, commands for a terminal, as a program of their own (cmd/holdfast) or in the service's binary;
//   - agents, a server of the Model Context Protocol.
//
// A service compiles only the packages that it imports. The page needs neither the commands' libraries nor the agents'.
//
//	service := operator.Config{
//		Outboxes:  []operator.Outbox{{Store: store, Relay: relay}},
//		Consumers: []operator.Consumer{{Name: "billing", Consumer: consumer, Inbox: entries}},
//	}
//	handler, err := page.New(service, page.Config{})
//	os.Exit(command.Run(ctx, service, os.Args[1:], os.Stdout, os.Stderr))
package operator

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// Config lists the parts of a service for the packages page, command and agents. Their New returns every violation in it.
// Each part may also have the methods Migrate, Setup, Check, Prune and Schema of its package: setup, doctor, prune and
// schema use them.
type Config struct {
	// Program is the name of the command in help and errors. Default: "holdfast".
	Program string
	// Outboxes, Consumers, Sweeps and Limiters are the parts to operate. Each is optional.
	Outboxes  []Outbox
	Consumers []Consumer
	Sweeps    []Sweep
	Limiters  []Limiter
	// Parts are further parts: idempotency stores, for the command idempotency, transaction managers, and
	// parts of the service itself.
	Parts []Part
	// Servers are pinged by doctor before its checks, so that a server that is down is reported once.
	// Optional.
	Servers []Server
	// Log records actions, with their authors and reasons. Optional: without it only outboxes record
	// their own changes.
	Log Log
	// TraceURL is the address of a trace, with {trace_id} in place of its id: https://tempo.example/trace/{trace_id}. Messages
	// then have a link to the trace that wrote them. Optional.
	TraceURL string
	// History keeps the figures of a day, for charts and for the ages of problems. Package history fills it. Optional.
	History History
}

// Outbox is an outbox and its relay.
type Outbox struct {
	// Name is its name in commands. Default: "outbox".
	Name string
	// Store is a *outboxpgx.Store or a *outboxtest.Store. Required.
	Store OutboxStore
	// Relay publishes for the command relay. It need not run. Optional.
	Relay *outbox.Relay
}

// OutboxStore is the required part of an outbox's store.
type OutboxStore interface {
	DeadLetters() outbox.DeadLetters
}

// Consumer is one consumer, on any broker. Consumers on RabbitMQ with the same DeadLetterPrefix share
// their dead letters: a change through one changes them for all. Give each a prefix, or list them in one
// Consumer only.
type Consumer struct {
	// Name is its name in commands. Required.
	Name string
	// Consumer is a consumer of inboxamqp, inboxredis or inboxtest. It need not run. Required.
	Consumer DeadLetterer
	// Inbox is the consumer's *inboxpgx.Store. Optional.
	Inbox any
}

// DeadLetterer is the required part of a consumer.
type DeadLetterer interface {
	DeadLetters() inbox.DeadLetters
}

// Sweep is a table whose rows expire.
type Sweep struct {
	// Name is its name in commands. Required.
	Name string
	// Store is an *expirypgx.Store or an *expirytest.Store. Required.
	Store driver.Store
	// Sweeper lets the command sweep expire rows. Optional.
	Sweeper *expiry.Sweeper
}

// Limiter is a limiter and its limits.
type Limiter struct {
	// Name is its name in commands. Required.
	Name string
	// Limiter is a limiter of ratelimitredis, or a *ratelimit.Memory. Required.
	Limiter Limits
	// Limits can be shown and reset.
	Limits []ratelimit.Limit
	// Keys are the callers whose limits the status shows. "" is the key of a limit that all callers share.
	Keys []string
}

// Limits reads and resets limits.
type Limits interface {
	Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error)
	Reset(ctx context.Context, charges ...ratelimit.Charge) error
}

// Part is anything with one of the methods Migrate, Setup, Check, Prune or Schema, such as an
// *idempotencypgx.Store.
type Part struct {
	// Name is its name in commands. Required, as Part is.
	Name string
	Part any
}

// Server is a server that the service uses.
type Server struct {
	// Name is its name in errors. Required, as Ping is.
	Name string
	// Ping returns nil if the server answers. It has 10 s.
	Ping func(ctx context.Context) error
	// Connections returns the connections, for the status. Optional.
	Connections Connected
}

// Access is the right of a visitor of the page, or of an agent.
type Access struct {
	// By is the name in the log: at most 128 bytes without control characters. Required if Change is
	// set.
	By string
	// Bodies allows reading the bodies and headers of messages.
	Bodies bool
	// Change allows to retry and drop dead letters, to pause and resume, and to reset limits. With Bodies it also allows
	// editing.
	Change bool
}

// MaskedMessage is a message whose body is about to be shown.
type MaskedMessage struct {
	From        string // the outbox or the consumer
	Name        string
	ContentType string
	Body        []byte
}

// Connections are the connections of one role and program to a server.
type Connections struct {
	// Role is the user of the server, and Program the name that the client has set.
	Role    string `json:"role"`
	Program string `json:"program"`
	// Active connections run a statement, Waiting ones are idle in a transaction, Idle ones do nothing. See also RedisConnections.
	Active  int `json:"active"`
	Waiting int `json:"waiting"`
	Idle    int `json:"idle"`
}

// Connected returns the connections to a server, and the server's limit. A Connected is safe for concurrent use.
type Connected func(ctx context.Context) (roles []Connections, most int, err error)

// maxRoles bounds the roles and programs of a server.
const maxRoles = 100

// PostgresConnections returns the Connected of a pool's database. Without the rights of pg_read_all_stats it returns
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

// RedisConnections returns the Connected of a Redis server, or of one node of a cluster. List returns the reply to CLIENT LIST,
// as a client's ClientList does. Active clients wait for a blocking command, and waiting ones are in a MULTI. If the server
// forbids the command, there are no connections and no error. The server's limit is unknown.
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

// clientsByRole parses https://redis.io/docs/latest/commands/client-list/.
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
