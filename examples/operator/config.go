package operator

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// Config lists what the service has. Each part may also have the methods Migrate, Setup, Check, Prune
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

// name is what a part may be called: it stands in flags and addresses.
var name = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

func (c Config) withDefaults() Config {
	c.Program = cmp.Or(c.Program, "holdfast")
	outboxes := make([]Outbox, len(c.Outboxes))
	for i, o := range c.Outboxes {
		o.Name = cmp.Or(o.Name, "outbox")
		outboxes[i] = o
	}
	c.Outboxes = outboxes
	return c
}

func (c Config) validate() error {
	var errs []error
	taken := map[string]bool{}
	check := func(kind, text string, missing bool) {
		switch {
		case !name.MatchString(text):
			errs = append(errs, fmt.Errorf("operator: %s %.70q: a name is 1 to 64 letters, digits, dots, dashes and underscores", kind, text))
		case taken[text]:
			errs = append(errs, fmt.Errorf("operator: %s %s: the name is taken", kind, text))
		case missing:
			errs = append(errs, fmt.Errorf("operator: %s %s is nil", kind, text))
		}
		taken[text] = true
	}
	for _, o := range c.Outboxes {
		check("outbox", o.Name, o.Store == nil)
	}
	for _, q := range c.Consumers {
		check("consumer", q.Name, q.Consumer == nil)
	}
	for _, s := range c.Sweeps {
		check("sweep", s.Name, s.Store == nil)
	}
	for _, l := range c.Limiters {
		check("limiter", l.Name, l.Limiter == nil)
	}
	for _, p := range c.Parts {
		check("part", p.Name, p.Part == nil)
	}
	for _, s := range c.Servers {
		if s.Name == "" || s.Ping == nil {
			errs = append(errs, errors.New("operator: a server needs a name and a Ping"))
		}
	}
	return errors.Join(errs...)
}

// parts are all parts by their names, those of one outbox or consumer one after the other.
func (c Config) parts() []Part {
	var all []Part
	add := func(name string, part any) {
		if part != nil {
			all = append(all, Part{name, part})
		}
	}
	for _, o := range c.Outboxes {
		add(o.Name, o.Store)
		if o.Relay != nil {
			add(o.Name, o.Relay)
		}
	}
	for _, q := range c.Consumers {
		add(q.Name, q.Inbox)
		add(q.Name, q.Consumer)
	}
	for _, s := range c.Sweeps {
		add(s.Name, s.Store)
	}
	for _, l := range c.Limiters {
		add(l.Name, l.Limiter)
	}
	all = append(all, c.Parts...)
	if c.Log != nil {
		add("log", c.Log)
	}
	return all
}
