package driver

import (
	"bytes"
	"encoding/json"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
)

// The limits of a history. Its first half are the first failures, which say how it began.
const (
	MaxHistory         = 10
	maxHistoryError    = 200
	maxHistoryConsumer = 64
	// MaxHistoryBytes bounds what EncodeHistory returns.
	MaxHistoryBytes = 4 << 10
)

// Progressed returns what the next attempt of a message carries that failed at the time now:
// unchanged for a failure that does not count.
func Progressed(m *inbox.Message, f Failure, d Decision, consumer string, now time.Time) Progress {
	p := Progress{Attempt: max(m.Attempt, 1), Recovered: m.Recovered, FirstFailedAt: m.FirstFailedAt, History: m.History}
	if !d.Counted {
		return p
	}
	p.Attempt++
	if d.Recovered {
		p.Recovered++
	}
	if p.FirstFailedAt.IsZero() {
		p.FirstFailedAt = now
	}
	p.History = remember(m.History, inbox.FailedAttempt{At: now, Error: errorText(f, maxHistoryError), Consumer: consumer})
	return p
}

// remember returns a history with one more failure. The old one stays as it is.
func remember(history []inbox.FailedAttempt, last inbox.FailedAttempt) []inbox.FailedAttempt {
	return bounded(append(slices.Clone(history), last))
}

// bounded cuts a history, of the transport or of before, in place: out of the middle.
func bounded(history []inbox.FailedAttempt) []inbox.FailedAttempt {
	if extra := len(history) - MaxHistory; extra > 0 {
		history = slices.Delete(history, MaxHistory/2, MaxHistory/2+extra)
	}
	for i := range history {
		history[i].Error = truncate(history[i].Error, maxHistoryError)
		history[i].Consumer = truncate(history[i].Consumer, maxHistoryConsumer)
	}
	return history
}

// historyEntry is a failure on the wire.
type historyEntry struct {
	At       string `json:"at"`
	Consumer string `json:"consumer,omitempty"`
	Error    string `json:"error"`
}

// EncodeHistory returns the form in which every transport carries a history: JSON, at most
// MaxHistoryBytes, for which it leaves out what is in the middle. It is "" when there is none.
func EncodeHistory(history []inbox.FailedAttempt) string {
	history = bounded(slices.Clone(history))
	for ; len(history) > 0; history = slices.Delete(history, len(history)/2, len(history)/2+1) {
		if text := encoded(history); len(text) <= MaxHistoryBytes {
			return text
		}
	}
	return ""
}

func encoded(history []inbox.FailedAttempt) string {
	entries := make([]historyEntry, len(history))
	for i, a := range history {
		entries[i] = historyEntry{a.At.UTC().Format(time.RFC3339Nano), a.Consumer, a.Error}
	}
	var text bytes.Buffer
	lines := json.NewEncoder(&text)
	lines.SetEscapeHTML(false) // it would make the texts longer
	_ = lines.Encode(entries)  // strings can always be encoded
	return string(bytes.TrimSpace(text.Bytes()))
}

// DecodeHistory reads what EncodeHistory has written. It comes from outside: what is too long or
// no such JSON is no history, and what is more than a history keeps is left out.
func DecodeHistory(text string) []inbox.FailedAttempt {
	if text == "" || len(text) > MaxHistoryBytes {
		return nil
	}
	var entries []historyEntry
	if err := json.Unmarshal([]byte(text), &entries); err != nil {
		return nil
	}
	var history []inbox.FailedAttempt
	for _, e := range entries {
		at, err := time.Parse(time.RFC3339Nano, e.At)
		if err != nil {
			at = time.Time{}
		}
		history = append(history, inbox.FailedAttempt{At: at, Consumer: e.Consumer, Error: e.Error})
	}
	return bounded(history)
}
