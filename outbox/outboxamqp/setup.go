package outboxamqp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/outbox"
)

// Setup declares what is missing of the exchanges that Check asks for, durable and
// of type topic, on a connection of its own. Those that exist are used as they are.
func (p *Publisher) Setup(ctx context.Context) error {
	names := p.exchanges()
	if len(names) == 0 {
		return errors.New("outboxamqp: setup: Config.Exchange is empty, and the default exchange needs no declaration")
	}
	return p.use(ctx, "setup", func(conn *amqpconn.Conn) error {
		for _, name := range names {
			if err := declare(conn, name); err != nil {
				return fmt.Errorf("exchange %q: %w", name, err)
			}
		}
		return nil
	})
}

func declare(conn *amqpconn.Conn, name string) error {
	if exists, err := conn.ExchangeExists(name); exists || err != nil {
		return err
	}
	err := conn.Try(func(ch *amqp.Channel) error {
		return ch.ExchangeDeclare(name, amqp.ExchangeTopic, true, false, false, false, nil)
	})
	if err == nil {
		return nil
	}
	// Another process may have declared it meanwhile, with other settings.
	if exists, _ := conn.ExchangeExists(name); exists {
		return nil
	}
	return err
}

// Check looks, on a connection of its own, whether the exchanges exist that the configuration can
// lead to: Config.Exchange and, if it is an outbox.Routes, what the Router names. Where a name of
// Routes.ByName goes by the default exchange, its queue must exist. Other routing keys without a
// binding cannot be found in this way: AMQP tells of bindings only by returning a message, and Check
// publishes none. Such messages fail as driver.Unroutable.
//
// nil: there is nothing to mend. Else the error joins the findings, each with a method Mend() string,
// and the failures to look.
func (p *Publisher) Check(ctx context.Context) error {
	found := check.Findings{Component: "outboxamqp"}
	found.Join(p.use(ctx, "check", func(conn *amqpconn.Conn) error {
		for _, name := range p.exchanges() {
			exists, err := conn.ExchangeExists(name)
			if err != nil {
				return err
			}
			if !exists {
				found.Add("declare it, or call Publisher.Setup", "exchange %q does not exist", name)
			}
		}
		for _, d := range p.direct() {
			exists, err := conn.QueueExists(d.queue)
			if err != nil {
				return err
			}
			if !exists {
				found.Add("declare the queue, or name an exchange for the message",
					"queue %q does not exist, to which messages %q go by the default exchange", d.queue, d.name)
			}
		}
		return nil
	}))
	return found.Err()
}

// exchanges returns the exchanges known before the first message, sorted, without the default one.
func (p *Publisher) exchanges() []string {
	routes, _ := p.cfg.Router.(outbox.Routes)
	names := []string{cmp.Or(routes.Exchange, p.cfg.Exchange)}
	for _, route := range routes.ByName {
		names = append(names, route.Exchange)
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(name string) bool { return name == "" })
}

// direct is a message name whose messages go to one queue by the default exchange.
type direct struct{ name, queue string }

func (p *Publisher) direct() []direct {
	routes, _ := p.cfg.Router.(outbox.Routes)
	var all []direct
	for _, name := range slices.Sorted(maps.Keys(routes.ByName)) {
		exchange, key := p.destination(routes.Route(outbox.Message{Name: name}), name)
		if exchange == "" {
			all = append(all, direct{name, key})
		}
	}
	return all
}

func (p *Publisher) use(ctx context.Context, what string, do func(*amqpconn.Conn) error) error {
	if err := amqpconn.Use(ctx, p.dial, p.cfg.CallTimeout, do); err != nil {
		return fmt.Errorf("outboxamqp: %s: %w", what, err)
	}
	return nil
}
