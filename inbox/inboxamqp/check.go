package inboxamqp

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/check"
)

// Check compares the broker with the requirements of the consumer. It reports:
//
//   - missing queues and exchanges, and names that RabbitMQ hides from the user
//   - queues declared with arguments other than Setup's
//   - a user who may not publish to the exchange of the delay queues
//   - messages in the queue holdfast.lost
//   - queues of older versions
//   - times in the Config that do not fit together
//   - the findings of the processor's own Check, if it has one
//
// Check cannot see bindings and policies, because AMQP has no request for them. To compare the arguments of a
// queue it declares the queue again. That changes nothing, but needs the permission to configure the queue.
//
// It returns nil if it finds nothing. Otherwise the error joins all findings, each with a method Fix() string,
// and the errors of checks that failed.
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
		view := &amqpconn.View{Conn: conn}
		var missing, closed []string
		for _, spec := range c.cfg.queues() {
			seen, err := view.Queue(spec.name)
			if err != nil {
				return err
			}
			switch seen {
			case amqpconn.Missing:
				missing = append(missing, spec.name)
			case amqpconn.Exists:
				compared, err := checkQueue(conn, spec, found)
				if err != nil {
					return err
				}
				if !compared {
					closed = append(closed, spec.name)
				}
			}
		}
		if len(missing) > 0 { // one finding, because one call fixes them all
			found.Add("declare them, or call Consumer.Setup", "%d queues do not exist: %s", len(missing), strings.Join(missing, ", "))
		}
		if len(closed) > 0 { // one finding, because one call by another user fixes them all
			found.Add("call Check once as the user that calls Setup, or grant configure on them",
				"the arguments of %d queues were not compared, because the user may not configure them: %s", len(closed), strings.Join(closed, ", "))
		}
		if err := c.cfg.checkSlots(view, found); err != nil {
			return err
		}
		if err := c.cfg.checkOldQueues(conn, found); err != nil {
			return err
		}
		if err := c.cfg.checkShared(view, found); err != nil {
			return err
		}
		if err := checkLost(conn, found); err != nil {
			return err
		}
		if err := checkExchanges(view, c.cfg.Bindings, found); err != nil {
			return err
		}
		view.Report(found)
		return nil
	})
	if err != nil {
		return fmt.Errorf("inboxamqp: check: %w", err)
	}
	return nil
}

// checkExchanges reports each missing exchange once, even if it has several bindings.
func checkExchanges(view *amqpconn.View, bindings []Binding, found *check.Findings) error {
	looked := map[string]bool{}
	for _, b := range bindings {
		if looked[b.Exchange] {
			continue
		}
		looked[b.Exchange] = true
		seen, err := view.Exchange(b.Exchange)
		if err != nil {
			return err
		}
		if seen == amqpconn.Missing {
			found.Add("declare it, or call Consumer.Setup", "exchange %q does not exist", b.Exchange)
		}
	}
	return nil
}

// checkTimes compares the times in the Config with each other and with the processor's.
func (s *settings) checkTimes(found *check.Findings) {
	s.memory.Check(s.ConsumerConfig, found)
	// The last prefetched message waits for all earlier messages of its worker.
	together := s.Concurrency * s.Batch
	rounds := (s.Prefetch + together - 1) / together
	if limit := driver.CallTimeout(s.ConsumerConfig, hold, s.Batch); limit >= hold/time.Duration(rounds) {
		found.Add("lower ConsumerConfig.Prefetch or ConsumerConfig.HandlerTimeout",
			"%d prefetched messages, %d at once in up to %v, may take longer than the %v after which the broker requeues them",
			s.Prefetch, together, limit, hold)
	}
}

// difference is an argument whose value differs from the one that Setup declares.
type difference struct{ name, is, reason string }

// overflow is the argument for the treatment of new messages by a full queue.
const overflow = "x-overflow"

// notCompared is the number of differing arguments after which a comparison stops.
const notCompared = 20

// refusalForm matches the broker's reason for refusing a declaration. The reason names the first argument that
// differs.
var refusalForm = regexp.MustCompile(`inequivalent arg '([^']+)' .*current is (?:none|the value )?(?:'([^']*)')?`)

// differences returns the arguments of a queue that differ from Setup's. It declares the queue with Setup's
// arguments. Each time the broker refuses, it takes over the value that the broker names and tries again.
func differences(conn *amqpconn.Conn, spec queueSpec) (all []difference, err error) {
	args := spec.table(spec.kind)
	for range notCompared {
		err := conn.Try(func(ch *amqp.Channel) error {
			_, err := ch.QueueDeclare(spec.name, true, false, false, false, args)
			return err
		})
		reply, refused := errors.AsType[*amqp.Error](err)
		if !refused || reply.Code != amqp.PreconditionFailed {
			return all, err
		}
		parts := refusalForm.FindStringSubmatch(reply.Reason)
		if parts == nil { // the queue is not durable, for example
			return append(all, difference{reason: reply.Reason}), nil
		}
		name, is := parts[1], parts[2]
		if is == classic && name == "x-queue-type" {
			delete(args, "x-delivery-limit")
			delete(args, "x-dead-letter-strategy")
			if !slices.ContainsFunc(all, func(d difference) bool { return d.name == overflow }) { // RabbitMQ 4 names the overflow before the type
				delete(args, overflow)
			}
		}
		if setArgument(args, name, is); name == "x-queue-type" && is == quorum {
			args["x-delivery-limit"] = int64(unlimited)
		}
		all = append(all, difference{name, is, reply.Reason})
	}
	return all, nil
}

// setArgument sets an argument to a value that the broker reported as text; empty text removes the argument.
func setArgument(args amqp.Table, name, is string) {
	n, err := strconv.ParseInt(is, 10, 64)
	switch {
	case is == "":
		delete(args, name)
	case err == nil:
		args[name] = n
	case is == "true" || is == "false":
		args[name] = is == "true"
	default:
		args[name] = is
	}
}

// matters reports whether an argument must have Setup's value. Another program may have declared the consumer's
// own queue, and it may choose the other arguments. The queue type matters only for shared queues.
func (q queueSpec) matters(d difference) bool {
	switch {
	case d.name == "x-delivery-limit":
		n, err := strconv.Atoi(d.is)
		return err != nil || n >= 0 && n < unlimited
	case q.use == shared:
		return true
	case q.use == own:
		return d.name == singleActive || d.name == overflow && strings.HasPrefix(d.is, "reject-publish")
	}
	return d.name == "x-message-ttl"
}

// checkQueue compares the arguments of an existing queue. It returns false if the user has no permission for that.
func checkQueue(conn *amqpconn.Conn, spec queueSpec, found *check.Findings) (compared bool, err error) {
	all, err := differences(conn, spec)
	if amqpconn.IsRefused(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, d := range all {
		if spec.matters(d) {
			found.Add(fix(spec, d), "queue %q differs from the one that Consumer.Setup declares: %s", spec.name, d.reason)
		}
	}
	return true, nil
}

// fix returns the fix for an argument that differs.
func fix(spec queueSpec, d difference) string {
	switch {
	case d.name == "x-delivery-limit":
		return fmt.Sprintf("set a policy with delivery-limit %d for the queue before the broker is upgraded to RabbitMQ 4, "+
			"which drops a message that was returned 20 times; Check cannot see policies, so leave it if the policy is set", unlimited)
	case d.name == singleActive:
		return "stop its consumers, wait until nothing waits for a retry, move its messages elsewhere, delete it and call Consumer.Setup: " +
			"messages of one key may overtake each other, because the queue serves several consumers at once"
	case d.name == overflow && spec.use == own:
		return "allow the queue to accept all messages: while it is full, its retries stay in the delay queues, and some dozens of them block " +
			"the retries of all consumers of the virtual host. To replace it, wait until nothing waits for a retry, " +
			"move its messages elsewhere, delete it and call Consumer.Setup"
	case spec.use == shared:
		return "delete the queue when it is empty and call Consumer.Setup; leave it if a policy sets the same"
	}
	if spec.use == dead {
		return "move its dead letters elsewhere before they expire, delete the queue and call Consumer.Setup; leave it if they should expire"
	}
	return "wait until nothing waits for a retry, delete the queue and call Consumer.Setup: its messages are only counters"
}

// checkShared looks for the shared exchanges, and whether the user may publish to the exchange of the delay queues.
func (s *settings) checkShared(view *amqpconn.View, found *check.Findings) error {
	for _, e := range sharedExchanges {
		seen, err := view.Exchange(e.name)
		if err != nil {
			return err
		}
		if seen == amqpconn.Missing {
			found.Add("call Consumer.Setup", "exchange %q does not exist, so no message can wait for a retry", e.name)
			return nil
		}
	}
	err := view.Conn.Try(func(ch *amqp.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return err
		}
		closed := ch.NotifyClose(make(chan *amqp.Error, 1))
		// No delay queue matches a message without the header, so the broker drops this one.
		confirm, err := ch.PublishWithDeferredConfirm(delayExchange, s.queue, false, false, amqp.Publishing{})
		if err != nil {
			return err
		}
		select {
		case <-confirm.Done():
			return nil
		case err := <-closed:
			if err == nil {
				return amqp.ErrClosed
			}
			return err
		}
	})
	if amqpconn.IsRefused(err) {
		found.Add("grant write on "+delayExchange, "the user may not publish to exchange %q, so no message can wait for a retry: %v", delayExchange, err)
		return nil
	}
	return err
}

// checkLost looks for messages that could not return to their queue.
func checkLost(conn *amqpconn.Conn, found *check.Findings) error {
	n, err := depth(conn, lostName)
	if amqpconn.IsRefused(err) { // checkShared has listed the exchange of that name
		return nil
	}
	if err != nil {
		return err
	}
	if n > 0 {
		found.Add("call the Setup of the consumer of that queue, and move them to exchange "+returnExchange+" by a shovel that keeps the routing key",
			"%d messages are in queue %q: when their delay was over, the queue that their routing key names did not exist or was not bound to exchange %q",
			n, lostName, returnExchange)
	}
	return nil
}

// oldRetries are delays in seconds, without jitter. Older versions had retry queues with these delays for each
// consumer.
var oldRetries = [...]float64{1, 2, 4, 8, 16, 32, 60}

// oldQueues returns the names of queues that older versions declared for this consumer and that are no longer
// used.
func (s *settings) oldQueues() (names []string) {
	for _, seconds := range oldRetries {
		for _, jitter := range [...]float64{0.8, 1, 1.2} {
			ms := min(time.Duration(seconds*jitter*1000+0.5), 60_000)
			names = append(names, fmt.Sprintf("%s.retry.%d", s.queue, ms))
		}
	}
	for _, class := range [...]string{driver.ClassDefault, driver.ClassQuarantined, driver.ClassUnrecoverable, driver.ClassValidation} {
		for _, prefix := range [...]string{"", s.DeadLetterPrefix} {
			names = append(names, driver.DeadLetterQueue(prefix, class))
		}
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(name string) bool {
		return slices.ContainsFunc(s.queues(), func(q queueSpec) bool { return q.name == name })
	})
}

// checkOldQueues reports queues of older versions.
func (s *settings) checkOldQueues(conn *amqpconn.Conn, found *check.Findings) error {
	var left []string
	for _, name := range s.oldQueues() {
		exists, err := conn.QueueExists(name)
		if err != nil && !amqpconn.IsRefused(err) { // names without permissions are not this consumer's
			return err
		}
		if exists {
			left = append(left, name)
		}
	}
	if len(left) > 0 {
		found.Add("wait until the retry queues are empty and move dead letters to queue "+s.deadLetterQueue(driver.ClassDefault)+", by a shovel for example; then delete them",
			"%d queues of an older version are left over: %s", len(left), strings.Join(left, ", "))
	}
	return nil
}
