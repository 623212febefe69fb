package inboxpgx_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/inbox/inboxtest/conformance"
	"github.com/holdfast-go/holdfast/inbox/internal/memory"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

type waiter func(ctx context.Context) error

func (w waiter) Wait(ctx context.Context) error { return w(ctx) }

func TestPrepareRunsBeforeTheTransaction(t *testing.T) {
	t.Parallel()
	manager := txretrytest.New(txretrytest.Config{Script: []txretrytest.Fault{{Point: txretrytest.AtCommit, SQLSTATE: "40001"}}})
	var trail []string
	p := newStore(t, manager, "a", inboxpgx.Config{
		Entries: memory.NewEntries(time.Hour),
		ByName: map[string]inboxpgx.HandlerConfig{conformance.Name: {Waiter: waiter(func(context.Context) error {
			trail = append(trail, "wait")
			return nil
		})}},
	})
	begun := func() int { return manager.Stats().Attempts }
	err := inboxpgx.HandlePrepared(p, conformance.Name,
		func(_ context.Context, e conformance.Event) (string, error) {
			trail = append(trail, "prepare")
			if begun() != 0 {
				t.Error("a transaction is open")
			}
			return "rate of the day", nil
		},
		func(_ context.Context, _ pgx.Tx, _ conformance.Event, rate string) error {
			trail = append(trail, rate)
			return nil
		})
	if err != nil {
		t.Fatal(err)
	}
	if err := process(t, p, event()); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(trail, ", "); got != "wait, prepare, rate of the day, rate of the day" {
		t.Errorf("trail = %s", got)
	}
}
