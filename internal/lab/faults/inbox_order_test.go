package faults_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Four processes share a queue of an ordered consumer. They are killed, ended and frozen, and the
// broker closes their connections, while one message in ten fails twice. Each message takes effect
// once, and those of a key in their order.
func TestInboxOrder(t *testing.T) {
	inboxBrokers(t, func(t *testing.T, b inboxBroker, batch int) {
		const keys, processes = 64, 4
		rng := seeded(t)
		o := &ordered{intake: newIntake(t, inboxJob{
			Database: pgtest.URL(t), Broker: b.url, Concurrency: 8, Batch: batch, Ordered: true, MaxCrashes: 1000,
		}), broker: b, rng: rng}
		for range processes {
			o.children = append(o.children, o.spawn())
		}
		faults := map[string]int{}
		for range scaled(t, 6) {
			o.send(keys, 10)
			time.Sleep(time.Duration(rng.IntN(800)) * time.Millisecond)
			faults[o.disturb()]++
		}
		o.settle()
		for _, c := range o.children {
			_ = c.cmd.Process.Signal(syscall.SIGTERM) // the last messages may have ended it
			<-c.ended
		}
		t.Logf("%v; %d messages", faults, len(o.sent))
		o.audit()
		o.noneDead()
		o.inOrder()
	})
}

// ordered is an intake of messages with keys, and the processes that consume them.
type ordered struct {
	*intake
	broker   inboxBroker
	rng      *rand.Rand
	children []*child
	sentOf   int // of each key
}

// spawn starts a process. Some end by themselves, at a place on a message's way.
func (o *ordered) spawn() *child {
	job := o.job
	if choice := o.rng.IntN(2 * len(crashPoints)); choice < len(crashPoints) {
		job.Crash, job.After = crashPoints[choice], int64(100+o.rng.IntN(1000))
	}
	c := spawn(o.t, "inbox", job)
	c.awaitReady()
	return c
}

// send publishes so many messages of each key, the keys mixed.
func (o *ordered) send(keys, each int) {
	o.t.Helper()
	for range each {
		o.sentOf++
		var msgs []amqp.Publishing
		for k, do := range mix(keys, o.rng) {
			key := fmt.Sprintf("key-%d", k)
			m := o.event(do)
			var err error
			m.Body, err = json.Marshal(inboxEvent{Do: do, Key: key, N: o.sentOf})
			must(o.t, err)
			m.Headers = amqp.Table{"holdfast-key": key}
			o.sent[uuid.MustParse(m.MessageId)] = do
			msgs = append(msgs, m)
		}
		ctx, cancel := context.WithTimeout(o.t.Context(), patience)
		err := o.publish(ctx, msgs)
		cancel()
		must(o.t, err)
	}
}

// disturb does something to one of the processes, or to the connections of all, and says what.
func (o *ordered) disturb() string {
	o.t.Helper()
	i := o.rng.IntN(len(o.children))
	c := o.children[i]
	select {
	case <-c.ended:
		o.children[i] = o.spawn()
		return "ended by itself"
	default:
	}
	switch o.rng.IntN(4) {
	case 0:
		c.kill()
		o.children[i] = o.spawn()
		return "killed"
	case 1:
		_ = c.cmd.Process.Signal(syscall.SIGTERM) // it may have ended by itself
		select {
		case <-c.ended:
		case <-time.After(3 * childPatience):
			o.t.Fatal("the child does not end")
		}
		o.children[i] = o.spawn()
		return "ended"
	case 2:
		_ = c.cmd.Process.Signal(syscall.SIGSTOP)
		time.Sleep(time.Duration(1+o.rng.IntN(12)) * time.Second) // a silent one counts as dead after 4 s, or 8 s on Redis
		_ = c.cmd.Process.Signal(syscall.SIGCONT)
		return "frozen"
	default:
		o.broker.closeConnections()
		return "connections closed"
	}
}

// settle waits until all is processed, as long as there is progress, and replaces the processes that
// end by themselves.
func (o *ordered) settle() {
	o.t.Helper()
	left, since := -1, time.Now()
	for ; left != 0; time.Sleep(20 * time.Millisecond) {
		for i, c := range o.children {
			select {
			case <-c.ended:
				o.children[i] = spawn(o.t, "inbox", o.job)
				o.children[i].awaitReady()
			default:
			}
		}
		n, err := o.missing()
		if err == nil && n != left {
			left, since = n, time.Now()
		}
		if time.Since(since) > testenv.Patience {
			o.t.Fatalf("%d messages do not take effect: %v", left, err)
		}
	}
}

// inOrder fails the test unless the effects of each key are in the order of its messages.
func (o *ordered) inOrder() {
	o.t.Helper()
	rows, _ := o.pool.Query(o.t.Context(), `SELECT key, n FROM inbox_effects ORDER BY place`) // ForEachRow returns its error
	last := map[string]int{}
	var key string
	var n int
	_, err := pgx.ForEachRow(rows, []any{&key, &n}, func() error {
		if n != last[key]+1 {
			o.t.Errorf("%s: number %d took effect after %d", key, n, last[key])
		}
		last[key] = n
		return nil
	})
	must(o.t, err)
	for key, n := range last {
		if n != o.sentOf {
			o.t.Errorf("%s ends at %d of %d", key, n, o.sentOf)
		}
	}
}
