package txretry

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
)

// SetWaits sets how long the manager waits for a connection and for the answer to BEGIN.
func (m *Manager) SetWaits(acquire, begin time.Duration) {
	m.bounds.acquire, m.bounds.begin = acquire, begin
}

// A lock that a statement waits for on its way with COMMIT is reported by the server before COMMIT is given up.
func TestCommitOutlastsLockWaits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		cfg  Config
		call Options
		want time.Duration
	}{
		{want: 9 * time.Second},
		{cfg: Config{LockTimeout: time.Second}, want: 9 * time.Second},
		{cfg: Config{LockTimeout: 20 * time.Second}, want: 21 * time.Second},
		{cfg: Config{LockTimeout: 20 * time.Second}, call: Options{LockTimeout: time.Second}, want: 9 * time.Second},
		{call: Options{LockTimeout: 20 * time.Second}, want: 21 * time.Second},
		{cfg: Config{CommitTimeout: 3 * time.Second}, want: 3 * time.Second},
		{cfg: Config{CommitTimeout: 3 * time.Second}, call: Options{CommitTimeout: 4 * time.Second}, want: 4 * time.Second},
	} {
		cfg := c.cfg.withDefaults()
		if got := c.call.withDefaults(&cfg).CommitTimeout; got != c.want {
			t.Errorf("manager's lock and commit timeouts %v, %v, call's %v, %v: got %v, want %v",
				c.cfg.LockTimeout, c.cfg.CommitTimeout, c.call.LockTimeout, c.call.CommitTimeout, got, c.want)
		}
	}
}

func TestBeginMessage(t *testing.T) {
	t.Parallel()
	for want, key := range map[string]beginKey{
		"begin isolation level read committed": {isolation: pgx.ReadCommitted},
		"begin isolation level serializable read only; set local lock_timeout = '8000ms'": {
			isolation: pgx.Serializable, readOnly: true, lockTimeout: 8 * time.Second,
		},
		"begin isolation level serializable; set local lock_timeout = '1ms'; set local statement_timeout = '2ms'; " +
			"set local idle_in_transaction_session_timeout = '3ms'; select pg_current_xact_id()": {
			isolation: pgx.Serializable, wantsXID: true, lockTimeout: time.Millisecond, statementTimeout: 1001 * time.Microsecond,
			idleTimeout: 3 * time.Millisecond,
		},
	} {
		if spec := key.spec(); spec.SQL != want || spec.WantsXID != key.wantsXID {
			t.Errorf("%+v: %+v", key, spec)
		}
	}
}

// A caller that computes its timeouts does not fill the memory.
func TestBeginCacheIsBounded(t *testing.T) {
	t.Parallel()
	var c beginCache
	for i := range 10 * maxBeginCache {
		c.spec(beginKey{isolation: pgx.Serializable, lockTimeout: time.Duration(i) * time.Second})
	}
	if len(c.specs) != maxBeginCache {
		t.Errorf("%d messages are remembered", len(c.specs))
	}
}

func take(t *testing.T, all *turns, key string) {
	t.Helper()
	if err := all.take(t.Context(), key); err != nil {
		t.Error(err)
	}
}

func TestTurnsAreFirstComeFirstServed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all turns
		var order []int
		take(t, &all, "seat:1")
		for i := range 10 {
			go func() {
				take(t, &all, "seat:1")
				defer all.pass("seat:1")
				order = append(order, i) // the race detector would see two at once
				time.Sleep(time.Second)
			}()
			synctest.Wait()
		}
		take(t, &all, "seat:2") // another key is free
		all.pass("seat:2")
		all.pass("seat:1")
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if !slices.IsSorted(order) || len(order) != 10 {
			t.Errorf("order = %v", order)
		}
		if len(all.waiting) != 0 {
			t.Errorf("%d keys are left behind", len(all.waiting))
		}
	})
}

func TestTurnGivenUpByContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var all turns
		take(t, &all, "k")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := all.take(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v although the key is held", err)
		}
		all.pass("k")
		take(t, &all, "k")
		all.pass("k")
		if len(all.waiting) != 0 {
			t.Errorf("%d keys are left behind", len(all.waiting))
		}
	})
}

type rewriter struct{}

func (rewriter) RewriteQuery(_ context.Context, _ *pgx.Conn, _ string, args []any) (string, []any, error) {
	return "rollback to a", args, nil
}

func TestIsPlain_onlyRowStatements(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]bool{
		"select 1":                            true,
		"  SELECT 1 ;\n":                      true,
		"select*from a":                       true,
		"values(1)":                           true,
		"-- name: Add :exec\r\nInsert into a": true,
		"/* a /* b */ c */--\n\t/**/ with a as ()": true,
		"":                                     false,
		"select":                               false,
		"selection":                            false,
		"select_1":                             false,
		"savepoint a":                          false,
		"select 1; savepoint a":                false,
		"/* a /* */ select 1 */ savepoint a":   false,
		"/* select 1":                          false,
		"-- select 1":                          false,
		"--\rsavepoint a\nselect 1":            false,
		"select SET_Config('role', 'a', true)": false,
		"update pg_settings set setting = 'a'": false,
		"do $$ begin end $$":                   false,
		"set local role a":                     false,
		"execute a":                            false,
		"explain analyze select 1":             false,
		"\ufeffselect 1":                       false,
	} {
		if got := isPlain(sql, nil); got != want {
			t.Errorf("isPlain(%q) = %v", sql, got)
		}
	}
	for name, args := range map[string][]any{
		"named": {pgx.NamedArgs{}}, "strict": {pgx.QueryExecModeExec, pgx.StrictNamedArgs{}}, "plain": {1, nil},
	} {
		if !isPlain("select 1", args) {
			t.Errorf("%s arguments are not plain", name)
		}
	}
	if isPlain("select 1", []any{pgx.QueryExecModeExec, rewriter{}}) {
		t.Error("a rewriter is plain")
	}
}
