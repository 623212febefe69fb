package inboxamqp

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/check"
)

// Check looks which queues and exchanges are missing, whether queues were declared with other arguments than
// Setup's, whether the user may publish to the exchange of the delay queues, whether messages are in the queue
// holdfast.lost, which queues of older versions are left over, and whether the times in the Config fit together; then it asks the processor, if that has a Check
// of its own. AMQP has no question for bindings and policies, so Check sees neither. To compare the arguments of
// a queue it declares the queue again, which needs the permission to configure it and changes nothing.
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
		var missing, closed []string
		for _, spec := range c.cfg.queues() {
			exists, err := conn.QueueExists(spec.name)
			if err != nil {
				return err
			}
			if !exists {
				missing = append(missing, spec.name)
			} else if compared, err := checkQueue(conn, spec, found); err != nil {
				return err
			} else if !compared {
				closed = append(closed, spec.name)
			}
		}
		if len(missing) > 0 { // one finding, since one call mends it
			found.Add("declare them, or call Consumer.Setup", "%d queues do not exist: %s", len(missing), strings.Join(missing, ", "))
		}
		if len(closed) > 0 { // one call as another user mends it
			found.Add("call Check once as the user that calls Setup, or grant configure on them",
				"the arguments of %d queues were not compared, because the user may not configure them: %s", len(closed), strings.Join(closed, ", "))
		}
		if err := c.cfg.checkSlots(conn, found); err != nil {
			return err
		}
		if err := c.cfg.checkOldQueues(conn, found); err != nil {
			return err
		}
		if err := c.cfg.checkShared(conn, found); err != nil {
			return err
		}
		if err := checkLost(conn, found); err != nil {
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
