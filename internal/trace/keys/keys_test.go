package keys

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

// play records calls such as "claim r, commit a, keep r a, answer a", a second apart. A lease lasts ten seconds.
func play(log *Log, calls string) {
	const lease = 10 * time.Second
	at := time.Now()
	for call := range strings.SplitSeq(calls, ", ") {
		at = at.Add(time.Second)
		now, words := at, append(strings.Fields(call), "", "")
		token, a := words[1], words[2]
		name, step := words[0], map[string]func(key) []key{
			"claim":     func(k key) []key { return k.claimed(token, lease, now, now) },
			"unseen":    func(k key) []key { return k.claimed(token, 0, now, now) },
			"extend":    func(k key) []key { return k.extended(token, now) },
			"busy":      func(k key) []key { return k.busy(token) },
			"lost":      func(k key) []key { return k.lost(token, now) },
			"replay":    func(k key) []key { return k.replayed(token) },
			"keep":      func(k key) []key { return k.keeps(token, a) },
			"release":   func(k key) []key { return k.released(token) },
			"commit":    func(k key) []key { return k.commits(token) },
			"forgotten": func(k key) []key { return k.commits(token) },
			"look":      func(k key) []key { return k.looks(token) },
			"answer":    func(k key) []key { return k.answers(token) },
		}[words[0]]
		switch name {
		case "wait":
			at = at.Add(lease)
		case "unseen":
			log.trace.AddOpen("k", claim, call, log.trace.Now(), step)
		case "forgotten": // a COMMIT without an answer
			log.trace.AddOpen("k", commit, call, log.trace.Now(), step)
		case "extend", "busy", "lost":
			log.trace.Add("k", claim, call, log.trace.Now(), step)
		default:
			log.trace.Add("k", name, call, log.trace.Now(), step)
		}
	}
}

// The acceptor allows the runs of correct callers, and refuses each run that differs from one in a single call.
func TestCheck_refusesMutatedRuns(t *testing.T) {
	t.Parallel()
	const run = "claim r, commit a, keep r a, answer a"
	for calls, good := range map[string]bool{
		run:                                    true,
		run + ", replay a, answer a, keep r a": true, // another caller, and a repetition
		"claim r, busy s, commit a, keep r a, replay a":                                  true,
		"claim r, release r, claim s, commit b, keep s b, answer b":                      true, // the work of r failed
		"claim r, commit a, wait, claim s, look a, keep s a, answer a":                   true, // r died after COMMIT
		"claim r, wait, claim s, lost r, commit b, keep s b, answer b":                   true, // r lost its lease
		"claim r, extend r, commit a, keep r a":                                          true,
		"unseen r, claim s, commit b, keep s b, answer b":                                true, // nobody knows how long r has it
		"claim r, forgotten a, look a, keep r a, answer a":                               true,
		"claim r, forgotten a, look, release r, claim s, commit b, keep s b, answer b":   true,  // NOT_COMMITTED
		"look, commit a, answer a":                                                       true,  // without a gate
		"claim r, claim s, commit a, keep r a":                                           false, // two holders
		"claim r, lost r, commit a, keep r a":                                            false, // the lease lasts
		"busy r, claim r, commit a, keep r a":                                            false, // nobody has the key
		"claim r, commit a, commit b, keep r a":                                          false, // a second effect
		"claim r, keep r a, commit a":                                                    false, // the gate keeps it before COMMIT
		"claim r, commit a, keep r b":                                                    false, // the gate keeps another answer
		"claim r, commit a, keep s a":                                                    false, // not the holder
		"claim r, commit a, release s":                                                   false, // not the holder
		run + ", release r":                                                              false, // the answer is forgotten
		run + ", claim s":                                                                false, // it runs again
		run + ", replay b":                                                               false, // another answer
		"claim r, commit a, replay a":                                                    false, // the gate does not have it yet
		"claim r, commit a, keep r a, answer b":                                          false, // another answer
		"claim r, answer a, commit a":                                                    false, // the answer comes before COMMIT
		"commit a, look, answer a":                                                       false, // the record is not seen
		"claim r, forgotten a, look a, release r, claim s, commit b, keep s b, answer b": false, // it had committed
		"claim r, release r":                                                             false, // no record
		"claim r, wait, claim s, extend r, commit b, keep s b":                           false, // r is not the holder
	} {
		log := New()
		play(log, calls)
		if err := log.Check(); (err == nil) != good {
			t.Errorf("%s: %v", calls, err)
		}
	}
}
