package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/check"
)

// Finding is one thing that Check found amiss.
type Finding = check.Finding

const component = "inboxamqp"

// Check looks which of the queues and of the exchanges of the bindings are missing, whether
// the retry queues return their messages when they should, and whether the times in the
// Config fit together. It cannot see the bindings themselves: AMQP has no question for them.
// The error means that it could not look.
func (c *Consumer) Check(ctx context.Context) ([]Finding, error) {
	findings := c.checkTimes()
	err := amqpconn.Use(ctx, c.dial, c.cfg.CallTimeout, func(conn *amqpconn.Conn) error {
		for i, spec := range c.queues() {
			problem, err := checkQueue(conn, spec, i > 0)
			if err != nil {
				return err
			}
			if problem != nil {
				findings = append(findings, *problem)
			}
		}
		for _, b := range c.cfg.Bindings {
			exists, err := conn.ExchangeExists(b.Exchange)
			if err != nil {
				return err
			}
			if !exists {
				findings = append(findings, Finding{
					Component: component, Problem: fmt.Sprintf("exchange %q does not exist", b.Exchange),
					Mend: "declare it, for example by outboxamqp.Publisher.Setup",
				})
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("inboxamqp: check: %w", err)
	}
	return findings, nil
}

// checkTimes compares what the Config promises.
func (c *Consumer) checkTimes() []Finding {
	var findings []Finding
	if window := driver.Horizon(c.cfg.Retry) + c.cfg.DeadLetterAge; c.cfg.Retention < window {
		findings = append(findings, Finding{
			Component: component,
			Problem: fmt.Sprintf("a message may be retried and replayed for %v, and is remembered for %v: after that it takes effect again",
				window, c.cfg.Retention),
			Mend: "lengthen the retention of the processor and Config.Retention, or shorten Config.Retry.MaxAge or Config.DeadLetterAge",
		})
	}
	// The last message of the prefetch waits for all that are before it on its worker.
	together := c.cfg.Concurrency * c.cfg.Batch
	rounds := (c.cfg.Prefetch + together - 1) / together
	if limit := c.cfg.limit(c.cfg.Batch); limit >= c.cfg.AckTimeout/time.Duration(rounds) {
		findings = append(findings, Finding{
			Component: component,
			Problem: fmt.Sprintf("%d prefetched messages, %d at once in up to %v, may take longer than the %v after which the broker takes them back",
				c.cfg.Prefetch, together, limit, c.cfg.AckTimeout),
			Mend: "lower Config.Prefetch or HandlerTimeout, or raise the broker's consumer_timeout and Config.AckTimeout",
		})
	}
	return findings
}

// checkQueue asks for a queue. Of a queue that holds messages for a time it compares the
// arguments that decide when and whereto they leave, by declaring it again as it should be:
// the broker refuses that when they differ, and changes nothing when they do not.
func checkQueue(conn *amqpconn.Conn, spec queueSpec, ours bool) (*Finding, error) {
	exists, err := conn.QueueExists(spec.name)
	if err != nil {
		return nil, err
	}
	if !exists {
		return &Finding{
			Component: component, Problem: fmt.Sprintf("queue %q does not exist", spec.name), Mend: "declare it, or call Consumer.Setup",
		}, nil
	}
	if !ours || spec.args["x-message-ttl"] == nil {
		return nil, nil
	}
	differs := &amqp.Error{Reason: "it is of another type"}
	for _, kind := range []QueueType{Quorum, Classic} {
		args := maps.Clone(spec.args)
		if kind == Classic {
			delete(args, "x-dead-letter-strategy")
			delete(args, "x-overflow")
		}
		err := conn.Try(func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclare(spec.name, true, false, false, false, queueArgs(conn, kind, args))
			return err
		})
		reply, refused := errors.AsType[*amqp.Error](err)
		switch {
		case err == nil:
			return nil, nil
		case !refused || reply.Code != amqp.PreconditionFailed:
			return nil, err
		}
		if !strings.Contains(reply.Reason, "x-queue-type") { // of the queue's own type
			differs = reply
		}
	}
	return &Finding{
		Component: component, Problem: fmt.Sprintf("retry queue %q differs from what this consumer needs: %s", spec.name, differs.Reason),
		Mend: "delete the queue when it is empty and call Consumer.Setup; leave it if a policy sets the same",
	}, nil
}
