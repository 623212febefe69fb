// Package flow counts the work that goes through the shop, from the request to the read model, and keeps the last
// steps, for the page.
package flow

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Stage is a stage that all work passes.
type Stage string

// The stages, in their order. A message that cannot be processed ends in Failed instead of Updated.
const (
	Request     Stage = "request"     // a POST was answered
	Transaction Stage = "transaction" // its transaction is committed
	Published   Stage = "published"   // the broker has a message from the outbox
	Processed   Stage = "processed"   // a message was processed
	Updated     Stage = "updated"     // the read model is updated
	Failed      Stage = "failed"      // an attempt to process a message has failed
)

// kept is how many steps are kept.
const kept = 40

// Step is one entry of a stage.
type Step struct {
	Number int64     `json:"number"` // from 1, without a gap
	At     time.Time `json:"at"`
	Stage  Stage     `json:"stage"`
	Text   string    `json:"text"`
}

// Flow records the work that goes through the shop. Its methods may be called from any goroutine.
type Flow interface {
	// Note counts one entry of a stage. It does not block.
	Note(stage Stage, text string)
	// Look returns the number of entries of each stage, and the last steps, the oldest first.
	Look(ctx context.Context) (counts map[Stage]int64, last []Step, err error)
}

// NoteAttempt records the outcome of an attempt to process a message.
func NoteAttempt(f Flow, name string, attempt int, err error) {
	if err == nil {
		f.Note(Processed, name)
		return
	}
	f.Note(Failed, fmt.Sprintf("%s, attempt %d", name, max(1, attempt)))
}

// Backlog is the number of messages on their way, and of dead ones. nil: unknown.
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

// New returns an empty Tracker.
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

// The keys in Redis. The part in braces puts both on one node of a cluster.
const (
	countsKey = "{reservation.flow}:counts" // a hash of numbers by stage
	stepsKey  = "{reservation.flow}:steps"  // a list, the oldest step first
)

const (
	// tellEvery is how often a process writes its notes to Redis.
	tellEvery   = 200 * time.Millisecond
	tellTimeout = 2 * time.Second
)

// Shared is the Flow of all processes of a shop, in Redis. A process writes its notes as soon as Redis answers. It is a
// view and no record: a killed process loses the notes that it has not written, and notes that Redis has stored without
// an answer count twice. A nil Shared notes nothing.
type Shared struct {
	redis  redis.UniversalClient
	untold *Tracker
}

// NewShared returns a Flow. Call its Run. The client stays the caller's.
func NewShared(client redis.UniversalClient) *Shared { return &Shared{client, New()} }

// Note implements Flow.
func (s *Shared) Note(stage Stage, text string) {
	if s != nil {
		s.untold.Note(stage, text)
	}
}

// Run writes the notes to Redis until ctx ends.
func (s *Shared) Run(ctx context.Context) error {
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		attempt, cancel := context.WithTimeout(ctx, tellTimeout)
		_ = s.Tell(attempt) // the next round tries again
		cancel()
	}
}

// Ready returns nil: no work depends on this view.
func (s *Shared) Ready(context.Context) error { return nil }

// Tell writes the new notes to Redis. It keeps the notes that it could not write.
func (s *Shared) Tell(ctx context.Context) error {
	counts, steps := s.untold.take()
	if len(counts) == 0 {
		return nil
	}
	_, err := s.redis.TxPipelined(ctx, func(tx redis.Pipeliner) error {
		for stage, n := range counts {
			tx.HIncrBy(ctx, countsKey, string(stage), n)
		}
		for _, step := range steps {
			text, err := json.Marshal(step)
			if err != nil {
				return err
			}
			tx.RPush(ctx, stepsKey, text)
		}
		tx.LTrim(ctx, stepsKey, -kept, -1)
		return nil
	})
	if err != nil {
		s.untold.giveBack(counts, steps)
		return fmt.Errorf("flow: %w", err)
	}
	return nil
}

// Look implements Flow.
func (s *Shared) Look(ctx context.Context) (map[Stage]int64, []Step, error) {
	var told *redis.MapStringStringCmd
	var last *redis.StringSliceCmd
	_, err := s.redis.TxPipelined(ctx, func(tx redis.Pipeliner) error {
		told, last = tx.HGetAll(ctx, countsKey), tx.LRange(ctx, stepsKey, 0, -1)
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("flow: %w", err)
	}
	counts, total := map[Stage]int64{}, int64(0)
	for stage, text := range told.Val() {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, nil, fmt.Errorf("flow: %s: %w", countsKey, err)
		}
		counts[Stage(stage)] = n
		total += n
	}
	steps := make([]Step, len(last.Val()))
	for i, text := range last.Val() {
		if err := json.Unmarshal([]byte(text), &steps[i]); err != nil {
			return nil, nil, fmt.Errorf("flow: %s: %w", stepsKey, err)
		}
		steps[i].Number = total - int64(len(steps)-1-i) // each step was counted once
	}
	return counts, steps, nil
}

// take returns the notes, and removes them.
func (t *Tracker) take() (counts map[Stage]int64, steps []Step) {
	t.mu.Lock()
	defer t.mu.Unlock()
	counts, steps = t.counts, t.steps
	t.counts, t.steps = map[Stage]int64{}, nil
	return counts, steps
}

// giveBack puts taken notes back before the newer ones.
func (t *Tracker) giveBack(counts map[Stage]int64, steps []Step) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for stage, n := range counts {
		t.counts[stage] += n
	}
	t.steps = slices.Concat(steps, t.steps)
	t.steps = t.steps[max(0, len(t.steps)-kept):]
}
