package operator

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Log keeps what operators did. *PostgresLog and *MemoryLog are two. Its methods are safe for
// concurrent use.
type Log interface {
	// Begin notes an action before anything is changed, and returns its number.
	Begin(ctx context.Context, a Action) (int64, error)
	// End adds what came of it. An action that never ended was cut off.
	End(ctx context.Context, number int64, count int, failure string) error
	// List returns the newest actions that the filter chooses, the newest first.
	List(ctx context.Context, f LogFilter) ([]Action, error)
}

// LogFilter chooses actions.
type LogFilter struct {
	// Limit is how many at most; at least 1.
	Limit int
	// WithoutUpkeep leaves out what a service does by itself, too: what IsUpkeep reports.
	WithoutUpkeep bool
}

// Action is something that an operator did.
type Action struct {
	// At is the time at which it began; of upkeep without --by and --reason that at which it ended.
	At time.Time `json:"at"`
	// What is a command that changes something, such as "retry". On is the part that it changed, and
	// Chosen which of it.
	What   string `json:"what"`
	On     string `json:"on"`
	Chosen string `json:"chosen"`
	By     string `json:"by"`
	Reason string `json:"reason"`
	// Count is how many were changed; nil: it is not known, since the action did not come to its end.
	Count *int `json:"count"`
	// Failure says why not all was done. Empty: it was.
	Failure string `json:"failure,omitempty"`
}

// upkeep are the commands that do what a service does by itself, too.
var upkeep = []string{"sweep", "prune", "setup"}

// IsUpkeep reports whether a service does the same by itself: sweep, prune and setup.
func (a Action) IsUpkeep() bool { return slices.Contains(upkeep, a.What) }

// logKept is how many actions a MemoryLog remembers.
const logKept = 1000

// MemoryLog keeps the last 1,000 actions in memory, for a service on fakes. The zero value is empty.
type MemoryLog struct {
	mu    sync.Mutex
	first int64 // number of the oldest that is kept
	kept  []Action
}

// Begin implements Log.
func (l *MemoryLog) Begin(_ context.Context, a Action) (int64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a.At, a.Count = time.Now(), nil
	if len(l.kept) == logKept {
		l.kept = append(l.kept[:0:0], l.kept[1:]...)
		l.first++
	}
	l.kept = append(l.kept, a)
	return l.first + int64(len(l.kept)) - 1, nil
}

// End implements Log.
func (l *MemoryLog) End(_ context.Context, number int64, count int, failure string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := number - l.first; i >= 0 && i < int64(len(l.kept)) {
		l.kept[i].Count, l.kept[i].Failure = &count, failure
	}
	return nil
}

// List implements Log.
func (l *MemoryLog) List(_ context.Context, f LogFilter) ([]Action, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var newest []Action
	for i := len(l.kept) - 1; i >= 0 && len(newest) < f.Limit; i-- {
		if !f.WithoutUpkeep || !l.kept[i].IsUpkeep() {
			newest = append(newest, l.kept[i])
		}
	}
	return newest, nil
}
