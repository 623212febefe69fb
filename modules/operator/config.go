package operator

import (
	"context"

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
