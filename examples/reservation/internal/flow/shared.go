package flow

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// Where the processes of a shop keep their flow. The part in braces puts both on one node of a cluster.
const (
	countsKey = "{reservation.flow}:counts" // a hash of numbers by stage
	stepsKey  = "{reservation.flow}:steps"  // a list, the oldest step first
)

const (
	// tellEvery is how often a process tells the others what it has noted.
	tellEvery   = 200 * time.Millisecond
	tellTimeout = 2 * time.Second
)

// Shared is the Flow of all processes of a shop, which is in Redis. A process tells what it has noted as soon as Redis
// answers. It is a view and no record: a process that is killed takes with it what it has not told, and what
// Redis has taken without an answer counts twice. A nil Shared notes nothing.
type Shared struct {
	redis  redis.UniversalClient
	untold *Tracker
}

// NewShared returns a Flow whose Run has to be run. The client stays the caller's.
func NewShared(client redis.UniversalClient) *Shared { return &Shared{client, New()} }

// Note implements Flow.
func (s *Shared) Note(stage Stage, text string) {
	if s != nil {
		s.untold.Note(stage, text)
	}
}

// Run tells what is noted until ctx ends.
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
		_ = s.Tell(attempt) // the next round tells it
		cancel()
	}
}

// Ready returns nil: no work waits for a view.
func (s *Shared) Ready(context.Context) error { return nil }

// Tell tells what was noted and not told yet. What cannot be told is kept.
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

// take returns what the tracker has, and empties it.
func (t *Tracker) take() (counts map[Stage]int64, steps []Step) {
	t.mu.Lock()
	defer t.mu.Unlock()
	counts, steps = t.counts, t.steps
	t.counts, t.steps = map[Stage]int64{}, nil
	return counts, steps
}

// giveBack returns what was taken before what was noted since.
func (t *Tracker) giveBack(counts map[Stage]int64, steps []Step) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for stage, n := range counts {
		t.counts[stage] += n
	}
	t.steps = slices.Concat(steps, t.steps)
	t.steps = t.steps[max(0, len(t.steps)-kept):]
}
