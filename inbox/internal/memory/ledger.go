// Package memory has what inboxtest keeps in place of tables.
package memory

import (
	"context"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Ledger is a driver.Ledger in memory. It is safe for concurrent use.
type Ledger struct {
	mu      sync.Mutex
	entries map[uuid.UUID]ledgerEntry
}

// ledgerEntry is a driver.LedgerEntry with the time at which its copy is due.
type ledgerEntry struct {
	driver.LedgerEntry
	due time.Time
}

// NewLedger returns a Ledger without entries.
func NewLedger() *Ledger { return &Ledger{entries: map[uuid.UUID]ledgerEntry{}} }

// Look implements driver.Ledger.
func (l *Ledger) Look(ctx context.Context, id uuid.UUID) (driver.LedgerEntry, error) {
	if err := ctx.Err(); err != nil {
		return driver.LedgerEntry{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[id]
	if !e.due.IsZero() {
		e.Overdue = max(time.Since(e.due), 0)
	}
	return e.LedgerEntry, nil
}

// Start implements driver.Ledger.
func (l *Ledger) Start(ctx context.Context, m *inbox.Message) error {
	return l.change(ctx, m.ID, func(e ledgerEntry) ledgerEntry {
		e = newest(e, m, 0, 0)
		e.Open++
		return e
	})
}

// End implements driver.Ledger.
func (l *Ledger) End(ctx context.Context, m *inbox.Message) error {
	return l.change(ctx, m.ID, func(e ledgerEntry) ledgerEntry {
		e.Open = 0
		return e
	})
}

// Pass implements driver.Ledger.
func (l *Ledger) Pass(ctx context.Context, m *inbox.Message, after time.Duration) error {
	return l.change(ctx, m.ID, func(e ledgerEntry) ledgerEntry {
		e = newest(e, m, 1, after)
		e.Open = 0
		return e
	})
}

// newest is the entry with the message, so many attempts on and due after a time, taken into account.
func newest(e ledgerEntry, m *inbox.Message, on int, after time.Duration) ledgerEntry {
	attempt, due := max(m.Attempt, 1)+on, time.Now().Add(after)
	switch {
	case m.Replays > e.Replays:
		return ledgerEntry{driver.LedgerEntry{Replays: m.Replays, Attempt: attempt}, due}
	case m.Replays == e.Replays && attempt >= e.Attempt:
		e.Attempt, e.due = attempt, due
	}
	return e
}

// Forget implements driver.Ledger.
func (l *Ledger) Forget(ctx context.Context, id uuid.UUID) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.entries, id)
	return nil
}

func (l *Ledger) change(ctx context.Context, id uuid.UUID, with func(ledgerEntry) ledgerEntry) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries[id] = with(l.entries[id])
	return nil
}
