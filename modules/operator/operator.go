// Package operator describes a service that is built on Holdfast to whoever operates it: a [Config] lists its outboxes,
// consumers, sweeps and limits. Three packages show the state of these, find dead letters, send them again or drop
// them, and do by hand what else runs in the background:
//
//   - page, a web page;
//   - command, commands for a terminal, as a program of their own (cmd/holdfast) or in the service's binary;
//   - agents, a server of the Model Context Protocol.
//
// A service compiles only those that it imports: the page brings neither the commands' libraries nor those of the agents.
//
//	service := operator.Config{
//		Outboxes:  []operator.Outbox{{Store: store, Relay: relay}},
//		Consumers: []operator.Consumer{{Name: "billing", Consumer: consumer, Inbox: books}},
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

// Config lists what a service has. Package page, command or agents is given it, and returns every violation in it. Each part may also have the methods Migrate, Setup, Check, Prune
// and Schema of its package: setup, doctor, prune and schema use them.
type Config struct {
	// Program is the name of the command, as help and errors show it. Default: "holdfast".
	Program string
	// Outboxes, Consumers, Sweeps and Limiters are what is operated. Each is optional.
	Outboxes  []Outbox
	Consumers []Consumer
	Sweeps    []Sweep
	Limiters  []Limiter
	// Parts are further parts: idempotency stores, which the command idempotency asks, transaction
	// managers, and what the service itself brings.
	Parts []Part
	// Servers are asked by doctor before everything else, so that one that is down is named once.
	// Optional.
	Servers []Server
	// Log keeps what was done, by whom and why. Optional: without it only the outboxes keep that, for
	// themselves.
	Log Log
}

// Outbox is an outbox and what publishes its messages.
type Outbox struct {
	// Name is what commands call it. Default: "outbox".
	Name string
	// Store is a *outboxpgx.Store or a *outboxtest.Store. Required.
	Store OutboxStore
	// Relay lets the command relay publish; one that never runs will do. Optional.
	Relay *outbox.Relay
}

// OutboxStore is what an outbox has in any case.
type OutboxStore interface {
	DeadLetters() outbox.DeadLetters
}

// Consumer is one consumer, whatever its broker. Consumers on RabbitMQ that set the same
// DeadLetterPrefix share their dead letters: what is done to those of one is done to those of all. Give
// each a prefix, or list them in one Consumer only.
type Consumer struct {
	// Name is what commands call it. Required.
	Name string
	// Consumer is one of inboxamqp, inboxredis or inboxtest; one that never runs will do. Required.
	Consumer DeadLetterer
	// Inbox is the consumer's *inboxpgx.Store. Optional.
	Inbox any
}

// DeadLetterer is what a consumer has in any case.
type DeadLetterer interface {
	DeadLetters() inbox.DeadLetters
}

// Sweep is a table whose rows expire.
type Sweep struct {
	// Name is what commands call it. Required.
	Name string
	// Store is an *expirypgx.Store or an *expirytest.Store. Required.
	Store driver.Store
	// Sweeper lets the command sweep expire rows. Optional.
	Sweeper *expiry.Sweeper
}

// Limiter is a limiter and the limits that callers of it have.
type Limiter struct {
	// Name is what commands call it. Required.
	Name string
	// Limiter is one of ratelimitredis, or a *ratelimit.Memory. Required.
	Limiter Limits
	// Limits are those that can be shown and reset.
	Limits []ratelimit.Limit
	// Keys are the callers whose limits the status shows, such as "" for a limit of all callers together.
	Keys []string
}

// Limits is what is asked of a limiter.
type Limits interface {
	Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error)
	Reset(ctx context.Context, charges ...ratelimit.Charge) error
}

// Part is anything with one of the methods Migrate, Setup, Check, Prune or Schema, such as an
// *idempotencypgx.Store.
type Part struct {
	// Name is what commands call it. Required, as Part is.
	Name string
	Part any
}

// Server is a server that the service stands on.
type Server struct {
	// Name is what errors call it. Required, as Ping is.
	Name string
	// Ping returns nil if the server answers. It has 10 s.
	Ping func(ctx context.Context) error
	// Connections tells who is connected, for the status. Optional.
	Connections Connected
}

// Access is what somebody may do on the page, or an agent.
type Access struct {
	// By is who it is, as the log keeps it: at most 128 bytes without control characters. Required where
	// Change is set.
	By string
	// Bodies allows to look at the bodies and the headers of messages.
	Bodies bool
	// Change allows to retry and drop dead letters, to pause and resume, and to reset limits; with Bodies also to
	// edit.
	Change bool
}

// MaskedMessage is a message whose body is about to be shown.
type MaskedMessage struct {
	From        string // the outbox or the consumer
	Name        string
	ContentType string
	Body        []byte
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
