package outboxamqp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// Setup declares the exchanges that Check requires and that do not exist, as durable topic exchanges. It opens a
// connection of its own. Existing exchanges are used as they are. It fails if Config names no exchange.
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
	// Another process may have declared the exchange meanwhile, with other settings.
	if exists, _ := conn.ExchangeExists(name); exists {
		return nil
	}
	return err
}

// Check looks, on a connection of its own, whether the exchanges named by Config.Exchange and Config.Routes exist.
// If a name in Routes uses the default exchange, its queue must exist. Check does not call Router, because its
// choice depends on the message. Check cannot find other routing keys without a binding: AMQP reports them only by
// returning a message, and Check publishes none. Such messages fail as driver.Unroutable.
//
// It returns nil if it finds nothing. Otherwise the error joins the findings, each with a method Fix() string,
// and the errors of checks that failed.
func (p *Publisher) Check(ctx context.Context) error {
	found := check.Findings{Component: "outboxamqp"}
	found.Join(p.use(ctx, "check", func(conn *amqpconn.Conn) error {
		view := amqpconn.View{Conn: conn}
		for _, name := range p.exchanges() {
			seen, err := view.Exchange(name)
			if err != nil {
				return err
			}
			if seen == amqpconn.Missing {
				found.Add("declare it, or call Publisher.Setup", "exchange %q does not exist", name)
			}
		}
		for _, d := range p.direct() {
			seen, err := view.Queue(d.queue)
			if err != nil {
				return err
			}
			if seen == amqpconn.Missing {
				found.Add("declare the queue, or name an exchange for the message",
					"queue %q does not exist, to which messages %q go by the default exchange", d.queue, d.name)
			}
		}
		view.Report(&found)
		return nil
	}))
	return found.Err()
}

// exchanges returns the exchanges known before the first message, sorted, without the default one.
func (p *Publisher) exchanges() []string {
	names := []string{p.cfg.Exchange}
	for _, route := range p.cfg.Routes {
		names = append(names, route.Exchange)
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(name string) bool { return name == "" })
}

// direct is a message name whose messages go to one queue through the default exchange.
type direct struct{ name, queue string }

func (p *Publisher) direct() []direct {
	if p.cfg.Router != nil {
		return nil // the Router may choose an exchange
	}
	var all []direct
	for _, name := range slices.Sorted(maps.Keys(p.cfg.Routes)) {
		if route := p.rules.Route(driver.Message{Name: name}); route.Exchange == "" {
			all = append(all, direct{name, route.RoutingKey})
		}
	}
	return all
}

func (p *Publisher) use(ctx context.Context, what string, do func(*amqpconn.Conn) error) error {
	if err := amqpconn.Use(ctx, p.dial, p.cfg.Timeout, do); err != nil {
		return fmt.Errorf("outboxamqp: %s: %w", what, err)
	}
	return nil
}
