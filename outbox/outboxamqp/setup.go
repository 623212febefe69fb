package outboxamqp

import (
	"context"
	"errors"
	"fmt"
	"slices"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/outbox"
)

// Finding is one thing that Check found amiss.
type Finding = check.Finding

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

// Check looks, on a connection of its own, whether the exchanges exist that
// Config.Exchange and, if it is an outbox.Routes, the Router name. The error
// means that it could not look.
func (p *Publisher) Check(ctx context.Context) ([]Finding, error) {
	var findings []Finding
	err := p.use(ctx, "check", func(conn *amqpconn.Conn) error {
		for _, name := range p.exchanges() {
			exists, err := conn.ExchangeExists(name)
			if err != nil {
				return err
			}
			if !exists {
				findings = append(findings, Finding{
					Component: "outboxamqp",
					Problem:   fmt.Sprintf("exchange %q does not exist", name),
					Mend:      "declare it, or call Publisher.Setup",
				})
			}
		}
		return nil
	})
	return findings, err
}

// exchanges returns the exchanges known before the first message, sorted.
func (p *Publisher) exchanges() []string {
	names := []string{p.cfg.Exchange}
	if routes, ok := p.cfg.Router.(outbox.Routes); ok {
		names = append(names, routes.Exchange)
		for _, route := range routes.ByName {
			names = append(names, route.Exchange)
		}
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(name string) bool { return name == "" })
}

func (p *Publisher) use(ctx context.Context, what string, do func(*amqpconn.Conn) error) error {
	if err := amqpconn.Use(ctx, p.dial, p.cfg.CallTimeout, do); err != nil {
		return fmt.Errorf("outboxamqp: %s: %w", what, err)
	}
	return nil
}
