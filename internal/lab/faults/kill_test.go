package faults_test

import (
	"slices"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// subject is a component whose process is killed.
type subject struct {
	name string
	// open lays out databases and queues. It skips the test where a server is missing.
	open func(t *testing.T) work
	// points are those where the process can be killed, in the order of the work. At toAck it has committed and has
	// not acknowledged.
	points  []string
	toAck   string
	nightly string // why a kill does not run with every change; "" means that it does
}

// work is a load for one process, and a check of all that came of it.
type work interface {
	// prepare writes messages, or chooses a request.
	prepare()
	// spawn starts the process that is killed.
	spawn(crash crash) *child
	// finish has another process, or this one, do what is left, and checks all.
	finish()
}

var subjects = []subject{
	{"outbox on RabbitMQ", relayOnRabbitMQ, relayPoints, "confirmed", ""},
	{"outbox on Redis", relayOnRedis, relayPoints, "confirmed", ""},
	{"inbox on RabbitMQ", inboxOnRabbitMQ, inboxPoints, "committed", ""},
	{"inbox on Redis", inboxOnRedis, inboxPoints, "committed", "a consumer takes over entries that are idle for 8 s"},
	{"idempotency, Redis before Postgres", idempotencyBehind(redisGate), idempotencyPoints, "committed", ""},
	{"idempotency, a gate that fails", idempotencyBehind(failingGate), idempotencyPoints, "committed", ""},
	{"idempotency, a lease in Postgres", idempotencyBehind(postgresGate), idempotencyPoints, "committed", ""},
	{"idempotency, Postgres alone", idempotencyBehind(noGate), idempotencyPoints, "committed", ""},
}

// A process dies between its COMMIT and the acknowledgement. Another one takes over: nothing is lost, and each
// effect takes place once.
func TestKill_betweenCommitAndAck(t *testing.T) {
	t.Parallel()
	for _, s := range subjects {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			if s.nightly != "" {
				testenv.Nightly(t, s.nightly)
			}
			killAt(t, s.open(t), crash{Point: s.toAck, After: 2})
		})
	}
}

// The same at every other point, for the first message and in the middle.
func TestKill_atEveryPoint(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "kills dozens of processes")
	for _, s := range subjects {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			w := s.open(t)
			for _, point := range s.points {
				for _, after := range []int{0, 3} {
					killAt(t, w, crash{point, after})
				}
			}
		})
	}
}

func killAt(t *testing.T, w work, c crash) {
	t.Helper()
	w.prepare()
	child := w.spawn(c)
	child.untilKilled()
	w.finish()
	if t.Failed() {
		t.Fatalf("after a kill at %q, passed %d times before", c.Point, c.After)
	}
}

// A message that ends its process is quarantined after MaxCrashes, and the messages beside it are processed once.
func TestKiller_isQuarantined(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "loses a process five times in a row")
	for name, open := range map[string]func(*testing.T) work{"RabbitMQ": inboxOnRabbitMQ, "Redis": inboxOnRedis} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i := open(t).(*intake)
			i.prepare()
			i.send(doKill)
			crashes := 0
			for c := i.spawn(crash{}); ; {
				select {
				case <-c.ended:
					if crashes++; crashes > 2*maxCrashes {
						t.Fatalf("the process ended %d times", crashes)
					}
					c = i.spawn(crash{})
					continue
				default:
				}
				if len(i.letters()) == 1 && i.settled() == nil {
					break
				}
			}
			if letter := i.letters()[0]; letter.Class != "quarantined" {
				t.Errorf("the killer is a dead letter of class %s", letter.Class)
			}
			// The first run counts only if the session was lost before it: nothing was noted otherwise.
			if !slices.Contains([]int{maxCrashes, maxCrashes + 1}, crashes) {
				t.Errorf("the process ended %d times, want %d: the first, and those counted", crashes, maxCrashes+1)
			}
			i.verify()
		})
	}
}
