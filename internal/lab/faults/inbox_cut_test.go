package faults_test

import (
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A message whose handler ends its connection looks like a database that goes down. The
// others flow, and it is a dead letter after as many attempts as any.
func TestInboxCutsItsConnection(t *testing.T) {
	t.Parallel()
	for name, batch := range map[string]int{"one by one": 1, "batches": 20} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rng := seeded(t)
			i := newIntake(t, inboxJob{Database: pgtest.URL(t), Broker: amqptest.New(t).URL, Concurrency: 4, Batch: batch})
			kinds := mix(200, rng)
			cuts := []int{0, 1, 120}
			for _, k := range cuts {
				kinds[k] = doCut
			}
			must(t, i.send(kinds...))
			began := time.Now()
			stop := i.start()
			i.settle()
			t.Logf("the others took %.1f s", time.Since(began).Seconds())
			testenv.Eventually(t, func() error {
				must(t, i.send(doWell)) // it is found out by others that go through
				if len(i.dead()) < len(cuts) {
					return errors.New("not all are dead letters")
				}
				return nil
			})
			t.Logf("dead after %.1f s", time.Since(began).Seconds())
			i.settle()
			stop()
			i.audit()
			for id, letters := range i.dead() {
				if i.sent[id] != doCut || len(letters) != 1 || letters[0].Class != driver.ClassDefault || letters[0].Attempts != inboxRetries+1 {
					t.Errorf("message %s, %q: %d dead letters, %s after %d attempts: %s",
						id, i.sent[id], len(letters), letters[0].Class, letters[0].Attempts, letters[0].Error)
				}
			}
		})
	}
}
