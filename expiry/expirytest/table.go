package expirytest

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Table is a small table of rows with a deadline and a state, for tests that
// have none of their own. Its Active and Expire methods serve [Config]. It is
// safe for concurrent use.
type Table struct {
	mu   sync.Mutex
	rows map[string]tableRow
}

type tableRow struct {
	deadline time.Time
	state    string
}

// The states of a Table's rows that expirytest knows.
const (
	Held    = "held"
	Expired = "expired"
)

// NewTable returns an empty Table.
func NewTable() *Table { return &Table{rows: map[string]tableRow{}} }

// Put writes a row as part of the transaction, whether it was there or not.
func (t *Table) Put(tx pgx.Tx, id string, deadline time.Time, state string) error {
	var old tableRow
	var known bool
	return txretrytest.Effect(tx, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		old, known = t.rows[id]
		t.rows[id] = tableRow{deadline, state}
	}, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if known {
			t.rows[id] = old
		} else {
			delete(t.rows, id)
		}
	})
}

// Get returns a row's deadline and state, or false if there is no such row.
func (t *Table) Get(id string) (deadline time.Time, state string, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	row, ok := t.rows[id]
	return row.deadline, row.state, ok
}

// Active returns the rows that are held; see Config.Active.
func (t *Table) Active() []expiry.Row {
	t.mu.Lock()
	defer t.mu.Unlock()
	var active []expiry.Row
	for id, row := range t.rows {
		if row.state == Held {
			active = append(active, expiry.Row{ID: id, Deadline: row.deadline})
		}
	}
	return active
}

// Expire sets a row's state to expired; see Config.Expire.
func (t *Table) Expire(_ context.Context, tx pgx.Tx, row expiry.Row) error {
	deadline, state, ok := t.Get(row.ID)
	if !ok || state != Held {
		return fmt.Errorf("expirytest: row %q is not held", row.ID)
	}
	return t.Put(tx, row.ID, deadline, Expired)
}
