// Package memory has what inboxtest keeps in place of tables.
package memory

import (
	"context"
	"sync"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Ledger is a driver.Ledger in memory. It is safe for concurrent use.
type Ledger struct {
	mu      sync.Mutex
	entries map[uuid.UUID]driver.LedgerEntry
}

// NewLedger returns a Ledger without entries.
func NewLedger() *Ledger { return &Ledger{entries: map[uuid.UUID]driver.LedgerEntry{}} }

// Look implements driver.Ledger.
func (l *Ledger) Look(ctx context.Context, id uuid.UUID) (driver.LedgerEntry, error) {
	if err := ctx.Err(); err != nil {
		return driver.LedgerEntry{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.entries[id], nil
}

// Start implements driver.Ledger.
func (l *Ledger) Start(ctx context.Context, m *inbox.Message) error {
	return l.change(ctx, m, func(e driver.LedgerEntry) driver.LedgerEntry {
		e = newest(e, m, 0)
		e.Open++
		return e
	})
}

// End implements driver.Ledger.
func (l *Ledger) End(ctx context.Context, m *inbox.Message) error {
	return l.change(ctx, m, func(e driver.LedgerEntry) driver.LedgerEntry {
		e.Open = 0
		return e
	})
}

// Pass implements driver.Ledger.
func (l *Ledger) Pass(ctx context.Context, m *inbox.Message) error {
	return l.change(ctx, m, func(e driver.LedgerEntry) driver.LedgerEntry {
		e = newest(e, m, 1)
		e.Open = 0
		return e
	})
}

// newest is the entry with the message, so many attempts on, taken into account.
func newest(e driver.LedgerEntry, m *inbox.Message, on int) driver.LedgerEntry {
	attempt := max(m.Attempt, 1) + on
	switch {
	case m.Replays > e.Replays:
		return driver.LedgerEntry{Replays: m.Replays, Attempt: attempt}
	case m.Replays == e.Replays:
		e.Attempt = max(e.Attempt, attempt)
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

func (l *Ledger) change(ctx context.Context, m *inbox.Message, with func(driver.LedgerEntry) driver.LedgerEntry) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries[m.ID] = with(l.entries[m.ID])
	return nil
}
