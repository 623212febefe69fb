package inboxtest

import (
	"context"
	"sync"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
)

// Ledger is the inbox.Ledger in memory. It is safe for concurrent use.
type Ledger struct {
	mu      sync.Mutex
	entries map[entry]inbox.LedgerEntry
}

// NewLedger returns a Ledger without entries.
func NewLedger() *Ledger { return &Ledger{entries: map[entry]inbox.LedgerEntry{}} }

// Look implements inbox.Ledger.
func (l *Ledger) Look(ctx context.Context, consumer string, id uuid.UUID) (inbox.LedgerEntry, error) {
	if err := ctx.Err(); err != nil {
		return inbox.LedgerEntry{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.entries[entry{consumer, id}], nil
}

// Start implements inbox.Ledger.
func (l *Ledger) Start(ctx context.Context, consumer string, m *inbox.Message) error {
	return l.change(ctx, consumer, m, func(e inbox.LedgerEntry) inbox.LedgerEntry {
		e = newest(e, m, 0)
		e.Open++
		return e
	})
}

// End implements inbox.Ledger.
func (l *Ledger) End(ctx context.Context, consumer string, m *inbox.Message) error {
	return l.change(ctx, consumer, m, func(e inbox.LedgerEntry) inbox.LedgerEntry {
		e.Open = 0
		return e
	})
}

// Pass implements inbox.Ledger.
func (l *Ledger) Pass(ctx context.Context, consumer string, m *inbox.Message) error {
	return l.change(ctx, consumer, m, func(e inbox.LedgerEntry) inbox.LedgerEntry {
		e = newest(e, m, 1)
		e.Open = 0
		return e
	})
}

// newest is the entry with the message, so many attempts on, taken into account.
func newest(e inbox.LedgerEntry, m *inbox.Message, on int) inbox.LedgerEntry {
	attempt := max(m.Attempt, 1) + on
	switch {
	case m.Replays > e.Replays:
		return inbox.LedgerEntry{Replays: m.Replays, Attempt: attempt}
	case m.Replays == e.Replays:
		e.Attempt = max(e.Attempt, attempt)
	}
	return e
}

// Forget implements inbox.Ledger.
func (l *Ledger) Forget(ctx context.Context, consumer string, id uuid.UUID) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.entries, entry{consumer, id})
	return nil
}

func (l *Ledger) change(ctx context.Context, consumer string, m *inbox.Message, with func(inbox.LedgerEntry) inbox.LedgerEntry) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	key := entry{consumer, m.ID}
	l.entries[key] = with(l.entries[key])
	return nil
}
