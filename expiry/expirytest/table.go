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

// table holds the rows of a Store that has no others.
type table struct {
	mu   sync.Mutex
	rows map[string]tableRow
}

type tableRow struct {
	deadline time.Time
	state    string
}

// The states of rows that matter to the table.
const (
	held    = "held"
	expired = "expired"
)

func newTable() *table { return &table{rows: map[string]tableRow{}} }

func (t *table) put(tx pgx.Tx, id string, row tableRow) error {
	var old tableRow
	var known bool
	return txretrytest.Effect(tx, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		old, known = t.rows[id]
		t.rows[id] = row
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

func (t *table) get(id string) (tableRow, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	row, ok := t.rows[id]
	return row, ok
}

func (t *table) active() []expiry.Row {
	t.mu.Lock()
	defer t.mu.Unlock()
	var active []expiry.Row
	for id, row := range t.rows {
		if row.state == held {
			active = append(active, expiry.Row{ID: id, Deadline: row.deadline})
		}
	}
	return active
}

func (t *table) expire(_ context.Context, tx pgx.Tx, row expiry.Row) error {
	found, ok := t.get(row.ID)
	if !ok || found.state != held {
		return fmt.Errorf("expirytest: row %q is not held", row.ID)
	}
	return t.put(tx, row.ID, tableRow{found.deadline, expired})
}
