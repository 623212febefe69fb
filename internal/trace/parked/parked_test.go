package parked

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// play records calls such as "deliver 0, commit 0, ack 0", one after the other.
func play(log *Log, calls string) {
	steps := map[string]func(key, int) []key{
		deliver: key.deliver, commit: key.commit, stop: key.stop, wait: key.wait, ack: key.ack, replay: key.replay, remove: key.remove,
	}
	for call := range strings.SplitSeq(calls, ", ") {
		var name string
		var number int
		if _, err := fmt.Sscan(call, &name, &number); err != nil {
			panic(err)
		}
		log.add(event{"k", number}, name, log.trace.Now(), func(k key) []key { return steps[name](k, number) })
	}
}

// The acceptor allows the runs of correct consumers, and refuses each run that differs from one in a single call.
func TestCheck_refusesMutatedRuns(t *testing.T) {
	t.Parallel()
	const (
		stopped = "deliver 0, deliver 1, stop 0, ack 0, wait 1, ack 1, "
		free    = "deliver 0, commit 0, ack 0, "
	)
	for calls, good := range map[string]bool{
		free + "deliver 1, commit 1, ack 1":                                         true,
		free + "deliver 0, wait 0, ack 0, deliver 1, commit 1, ack 1":               true, // a copy
		"deliver 0, deliver 1, commit 0, deliver 0, wait 0, ack 0, commit 1, ack 1": true, // the first ack was lost
		stopped + "replay 0, commit 0, commit 1":                                    true,
		stopped + "remove 0, commit 1, deliver 0, wait 0, ack 0":                    true,
		"deliver 0, stop 0, ack 0, replay 0, commit 0, deliver 1, commit 1, ack 1":  true, // the key is free
		"deliver 0, stop 0, ack 0, replay 0, commit 0, deliver 1, wait 1, commit 1": true, // it is not free yet
		"deliver 0, stop 0, ack 0, remove 0, deliver 1, stop 1, ack 1, remove 1":    true,
		"deliver 0, ack 0, commit 0, deliver 1, commit 1, ack 1":                    false, // acknowledged before COMMIT
		free + "deliver 0, commit 0, deliver 1, commit 1":                           false, // a second effect
		"deliver 0, deliver 1, commit 1, commit 0":                                  false, // out of order
		free + "commit 1":                 false, // it was not delivered
		free + "deliver 1, wait 1, ack 1": false, // it waits although its key is free
		"deliver 0, deliver 1, stop 0, ack 0, ack 1, replay 0, commit 0, commit 1": false, // acknowledged and not kept
		stopped + "commit 0, commit 1":                                             false, // a dead letter runs
		stopped + "commit 1, replay 0, commit 0":                                   false, // a message of a stopped key runs
		stopped + "replay 0, commit 1, commit 0":                                   false, // out of order
		stopped + "remove 0, deliver 0, commit 0, commit 1":                        false, // a removed message runs
		stopped + "replay 0, commit 0":                                             false, // the last message is forgotten
		stopped + "replay 0, commit 0, commit 1, commit 1":                         false, // a parked message runs twice
		free + "replay 0, deliver 1, commit 1":                                     false, // no dead letter
	} {
		log := NewLog()
		play(log, calls)
		if err := log.Check(2); (err == nil) != good {
			t.Errorf("%s: %v", calls, err)
		}
	}
}
