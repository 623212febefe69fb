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

// Check looks which of the queues and of the exchanges of the bindings are missing, whether the
// retry queues return their messages when they should, and whether the times in the Config fit
// together; then it asks the processor, if that has a Check of its own. It cannot see the bindings
// themselves: AMQP has no question for them.
//
// It returns nil when there is nothing to mend. Otherwise the error joins all findings, each
// with a method Mend() string, and what it failed to look at.
func (c *Consumer) Check(ctx context.Context) error {
	found := check.Findings{Component: component}
	c.cfg.checkTimes(&found)
	found.Join(c.checkTopology(ctx, &found))
	if p, ok := c.processor.(interface{ Check(context.Context) error }); ok {
		found.Join(p.Check(ctx))
	}
	return found.Err()
}

func (c *Consumer) checkTopology(ctx context.Context, found *check.Findings) error {
	err := amqpconn.Use(ctx, c.source.dial, c.cfg.Timeout, func(conn *amqpconn.Conn) error {
		var missing []string
		for _, spec := range c.cfg.queues() {
			exists, err := conn.QueueExists(spec.name)
			if err != nil {
				return err
			}
			if !exists {
				missing = append(missing, spec.name)
			} else if err := checkQueue(conn, spec, found); err != nil {
				return err
			}
		}
		if len(missing) > 0 { // one finding, since one call mends it
			found.Add("declare them, or call Consumer.Setup", "%d queues do not exist: %s", len(missing), strings.Join(missing, ", "))
		}
		if err := c.cfg.checkSlots(conn, found); err != nil {
			return err
		}
		return checkExchanges(conn, c.cfg.Bindings, found)
	})
	if err != nil {
		return fmt.Errorf("inboxamqp: check: %w", err)
	}
	return nil
}

// checkExchanges names each missing exchange once, however many bindings it has.
func checkExchanges(conn *amqpconn.Conn, bindings []Binding, found *check.Findings) error {
	looked := map[string]bool{}
	for _, b := range bindings {
		if looked[b.Exchange] {
			continue
		}
		looked[b.Exchange] = true
		exists, err := conn.ExchangeExists(b.Exchange)
		if err != nil {
			return err
		}
		if !exists {
			found.Add("declare it, or call Consumer.Setup", "exchange %q does not exist", b.Exchange)
		}
	}
	return nil
}

// checkTimes compares what the Config promises.
func (s *settings) checkTimes(found *check.Findings) {
	if window := driver.Horizon(s.Retry); s.remembers && s.retention > 0 && s.retention < window {
		found.Add("lengthen the Retention of the processor, or shorten Config.Retry.MaxAge",
			"a message may be retried for %v, and is remembered for %v: after that it takes effect again", window, s.retention)
	}
	if s.Ordered && !s.ledger {
		found.Add("use a processor that keeps a ledger, such as *inboxpgx.Store",
			"a message of an ordered consumer whose session is lost begins its attempts anew: the processor keeps no ledger")
	}
	// The last message of the prefetch waits for all that are before it on its worker.
	together := s.Concurrency * s.Batch
	rounds := (s.Prefetch + together - 1) / together
	if limit := driver.CallTimeout(s.ConsumerConfig, hold, s.Batch); limit >= hold/time.Duration(rounds) {
		found.Add("lower Config.Prefetch or Config.HandlerTimeout",
			"%d prefetched messages, %d at once in up to %v, may take longer than the %v after which the broker takes them back",
			s.Prefetch, together, limit, hold)
	}
}

// checkQueue looks at a queue that exists. Of one that holds messages for a time, and of an ordered
// consumer's own, it compares the arguments by declaring it again as it should be: the broker refuses
// that when they differ, and changes nothing when they do not.
func checkQueue(conn *amqpconn.Conn, spec queueSpec, found *check.Findings) error {
	held, ordered := spec.args["x-message-ttl"] != nil, spec.args[singleActive] != nil
	if !held && !ordered {
		return nil
	}
	differs, err := difference(conn, spec)
	switch {
	case err != nil || differs == "":
		return err
	case held:
		found.Add("delete the queue when it is empty and call Consumer.Setup; leave it if a policy sets the same",
			"retry queue %q differs from what this consumer needs: %s", spec.name, differs)
	case strings.Contains(differs, singleActive):
		found.Add("stop its consumers, move its messages elsewhere, delete it and call Consumer.Setup",
			"queue %q serves several consumers at once, so messages of one key may overtake each other: %s", spec.name, differs)
	default:
		found.Add("see that it was declared with "+singleActive+"; leave it if it was",
			"queue %q was not declared by Consumer.Setup, and may serve several consumers at once: %s", spec.name, differs)
	}
	return nil
}

// difference is why the broker does not take a queue for the one that Setup declares, of either type; ""
// if it does.
func difference(conn *amqpconn.Conn, spec queueSpec) (string, error) {
	differs := "it is of another type"
	for _, kind := range []string{quorum, classic} {
		args := maps.Clone(spec.args)
		if kind == classic {
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
			return "", nil
		case !refused || reply.Code != amqp.PreconditionFailed:
			return "", err
		}
		if !strings.Contains(reply.Reason, "x-queue-type") { // of the queue's own type
			differs = reply.Reason
		}
	}
	return differs, nil
}
