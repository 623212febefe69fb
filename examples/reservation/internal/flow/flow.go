// Package flow keeps count of what goes through the shop, from the request to the read model, and the last steps
// of it, for the page to show.
package flow

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// Stage is a place that everything passes on its way.
type Stage string

// The stages, in their order. A message that cannot be processed ends in Failed instead of Updated.
const (
	Request     Stage = "request"     // a POST was answered
	Transaction Stage = "transaction" // what it asked for is committed
	Published   Stage = "published"   // the broker has a message from the outbox
	Processed   Stage = "processed"   // the inbox has taken a message in
	Updated     Stage = "updated"     // the read model knows
	Failed      Stage = "failed"      // an attempt to process a message has failed
)

// kept is how many steps are kept.
const kept = 40

// Step is something that has come to a stage.
type Step struct {
	Number int64     `json:"number"` // from 1, without a gap
	At     time.Time `json:"at"`
	Stage  Stage     `json:"stage"`
	Text   string    `json:"text"`
}

// Flow is told what goes through the shop, and tells it. Its methods may be called from any goroutine.
type Flow interface {
	// Note counts something that has come to a stage. It waits for nothing.
	Note(stage Stage, text string)
	// Look returns how many have come to each stage, and the last steps, the oldest first.
	Look(ctx context.Context) (counts map[Stage]int64, last []Step, err error)
}

// NoteAttempt notes what came of an attempt to process a message.
func NoteAttempt(f Flow, name string, attempt int, err error) {
	if err == nil {
		f.Note(Processed, name)
		return
	}
	f.Note(Failed, fmt.Sprintf("%s, attempt %d", name, max(1, attempt)))
}

// Backlog is what is on its way, and what has left it. nil: it is not known.
type Backlog struct {
	Outbox *int `json:"outbox"` // not published yet
	Queue  *int `json:"queue"`  // published, and not processed yet
	Dead   *int `json:"dead"`   // given up, in the outbox and in the queue
}

// Tracker is the Flow of one process. It counts and keeps the last steps. A nil Tracker does nothing. It is safe for concurrent use.
type Tracker struct {
	mu     sync.Mutex
	number int64
	counts map[Stage]int64
	steps  []Step
}

// New returns a Tracker that has seen nothing.
func New() *Tracker { return &Tracker{counts: map[Stage]int64{}} }

// Note implements Flow.
func (t *Tracker) Note(stage Stage, text string) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.number++
	t.counts[stage]++
	if len(t.steps) == kept {
		t.steps = slices.Delete(t.steps, 0, 1)
	}
	t.steps = append(t.steps, Step{t.number, time.Now().UTC(), stage, text})
}

// Look implements Flow. It does not fail.
func (t *Tracker) Look(context.Context) (counts map[Stage]int64, last []Step, err error) {
	if t == nil {
		return nil, nil, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.counts), append([]Step{}, t.steps...), nil
}
