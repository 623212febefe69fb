package faults_test

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/pgtest"
)

// The consumer dies wherever it is: at chosen points of a message's way, between COMMIT and
// acknowledgement among them, and at any moment from outside.
func TestInboxConsumerKilled(t *testing.T) {
	inboxBrokers(t, func(t *testing.T, b inboxBroker, batch int) {
		rng := seeded(t)
		i := newIntake(t, inboxJob{
			Database: pgtest.URL(t), Broker: b.url, Concurrency: 4, Batch: batch,
			MaxCrashes: 20, // so many kills, and always at the first messages, meet the same one three times by chance
		})
		inside, outside := 0, 0
		for range scaled(t, 10) {
			must(t, i.send(mix(60, rng)...))
			job := i.job
			choice := rng.IntN(len(crashPoints) + 2)
			if choice < len(crashPoints) {
				job.Crash, job.After = crashPoints[choice], int64(1+rng.IntN(10))
			}
			c := spawn(t, "inbox", job)
			c.awaitReady()
			select {
			case <-c.ended:
				if status, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
					t.Fatalf("the child ended by itself: %v\n%s", c.err, c.errors.String())
				}
				inside++
			case <-time.After(time.Duration(50+rng.IntN(600)) * time.Millisecond):
				outside++
			}
			c.kill()
		}
		stop := i.start()
		i.settle()
		stop()
		t.Logf("killed %d times from inside, %d from outside; %d messages", inside, outside, len(i.sent))
		i.audit()
		i.noneDead()
	})
}

// A message that ends the process is given up in the end; what was processed beside it is not.
func TestInboxKillerIsQuarantined(t *testing.T) { inboxBrokers(t, testInboxKillerIsQuarantined) }

func testInboxKillerIsQuarantined(t *testing.T, b inboxBroker, batch int) {
	rng := seeded(t)
	i := newIntake(t, inboxJob{Database: pgtest.URL(t), Broker: b.url, Concurrency: 4, Batch: batch})
	kinds := mix(100, rng)
	kinds[40] = doKill
	must(t, i.send(kinds...))
	crashes := 0
	for ended := false; !ended; {
		c := spawn(t, "inbox", i.job)
		c.awaitReady()
		for waiting := true; waiting; {
			n, err := i.missing()
			select {
			case <-c.ended:
				crashes++
				waiting = false
			case <-time.After(20 * time.Millisecond):
				ended = err == nil && n == 0 && len(i.dead()) == 1 && i.empty()
				waiting = !ended
			}
		}
		if ended {
			c.end(&struct{}{})
		}
		if crashes > 2*maxCrashes {
			t.Fatalf("the process ended %d times", crashes)
		}
	}
	t.Logf("the process ended %d times", crashes)
	i.audit()
	for id, letters := range i.dead() {
		if i.sent[id] != doKill || letters[0].Class != driver.ClassQuarantined {
			t.Errorf("message %s, %q, is dead: %s: %s", id, i.sent[id], letters[0].Class, letters[0].Error)
		}
	}
	// A message whose session is lost before it runs comes again, so that its first run is counted, too.
	if crashes != maxCrashes+1 && crashes != maxCrashes {
		t.Errorf("the process ended %d times, want %d: the first, and those counted", crashes, maxCrashes+1)
	}
}

// Ten copies of each message, for two processes with several workers each.
func TestInboxDuplicateStorm(t *testing.T) { inboxBrokers(t, testInboxDuplicateStorm) }

func testInboxDuplicateStorm(t *testing.T, b inboxBroker, batch int) {
	rng := seeded(t)
	i := newIntake(t, inboxJob{Database: pgtest.URL(t), Broker: b.url, Concurrency: 4, Batch: batch})
	var copies []amqp.Publishing
	for _, do := range mix(scaled(t, 100), rng) {
		m := i.event(do)
		i.sent[uuid.MustParse(m.MessageId)] = do
		for range 10 {
			copies = append(copies, m)
		}
	}
	rng.Shuffle(len(copies), func(a, b int) { copies[a], copies[b] = copies[b], copies[a] })
	children := []*child{spawn(t, "inbox", i.job), spawn(t, "inbox", i.job)}
	must(t, i.publish(context.WithoutCancel(t.Context()), copies))
	i.settle()
	for _, c := range children {
		c.end(&struct{}{})
	}
	stop := i.start() // for what waited in a retry queue
	i.settle()
	time.Sleep(500 * time.Millisecond)
	stop()
	i.audit()
	i.noneDead()
}
