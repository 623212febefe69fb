// Package deadletter checks what the methods of outbox.DeadLetters are given, for every store alike.
package deadletter

import (
	"errors"
	"fmt"
	"hash/fnv"
	"regexp"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/actor"
	"github.com/holdfast-go/holdfast/outbox"
)

const (
	// ListLimit is how many letters a List without a limit returns.
	ListLimit = 100
	// GroupsLimit is how many groups a Groups without a limit returns.
	GroupsLimit = 1000
	// Retention is for how long consumers remember what they have processed, by default.
	Retention = 8 * 24 * time.Hour

	maxIDs  = 10_000
	maxText = 1000
)

// CheckList refuses a Filter that no List takes. The store checks its cursor.
func CheckList(f outbox.Filter) error {
	f.After = ""
	return CheckFilter(f)
}

// CheckFilter refuses a Filter that no store takes for anything but a List.
func CheckFilter(f outbox.Filter) error {
	var errs []error
	if f.After != "" {
		errs = append(errs, errors.New("outbox: Filter.After is for List alone"))
	}
	if f.Limit < 0 {
		errs = append(errs, fmt.Errorf("outbox: Filter.Limit is %d, want 0 or more", f.Limit))
	}
	if len(f.IDs) > maxIDs {
		errs = append(errs, fmt.Errorf("outbox: Filter.IDs has %d entries, at most %d are allowed", len(f.IDs), maxIDs))
	}
	if max(len(f.Class), len(f.Name), len(f.Key), len(f.Fingerprint), len(f.ErrorContains)) > maxText {
		errs = append(errs, fmt.Errorf("outbox: Filter has a text of more than %d bytes", maxText))
	}
	return errors.Join(errs...)
}

// CheckReplay refuses a Replay that no store takes.
func CheckReplay(r outbox.Replay) error {
	var errs []error
	if !r.DryRun || r.By != "" || r.Reason != "" {
		errs = append(errs, CheckActor(r.By, r.Reason))
	}
	if !(r.PerSecond >= 0) { // not a number is refused as well
		errs = append(errs, fmt.Errorf("outbox: Replay.PerSecond is %v, want 0 or more", r.PerSecond))
	}
	return errors.Join(errs...)
}

// CheckActor refuses who changes dead letters, and why, where an audit could not keep it.
func CheckActor(by, reason string) error {
	return actor.Check("outbox: by", "outbox: reason", by, reason)
}

// Outlived is the error of a replay that refused letters for their age, nil if there are none.
func Outlived(n int) error {
	if n == 0 {
		return nil
	}
	return fmt.Errorf("%d dead letters: %w", n, outbox.ErrOutlived)
}

// changing is what differs between failures of one kind: quotations, and words with a digit.
var changing = regexp.MustCompile("\"[^\"]*\"|'[^']*'|`[^`]*`|\\S*[0-9]\\S*")

// Fingerprint is outbox.DeadLetter.Fingerprint, for a store that does not reckon it itself.
func Fingerprint(class, transport, name, text string) string {
	h := fnv.New64a()
	h.Write([]byte(strings.Join([]string{class, transport, name, changing.ReplaceAllString(text, "#")}, "\n")))
	return fmt.Sprintf("%016x", h.Sum64())
}
