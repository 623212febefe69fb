package txretrytest

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/txretry"
)

// Config configures a [Manager]. The zero value is usable.
type Config struct {
	// Script holds the fault of each attempt, in order over all calls. Attempts
	// beyond its end succeed, as those with a zero Fault do.
	Script []Fault

	// Struck is called for each fault of Script that happens, with its index in Script. It is not called
	// for a fault whose attempt ends before the fault's Point. It must not block. Nil is allowed.
	Struck func(attempt int, f Fault)

	// Retry is the configuration of the retry loop, as of txretry.New.
	Retry txretry.Config
}

// Manager runs functions in fake transactions, one at a time. It implements
// txretry.Transactor and is safe for concurrent use.
type Manager struct {
	db    *database
	inner *txretry.Manager
}

// Stats counts what a [Manager] has done.
type Stats struct {
	Attempts  int // transactions begun, or refused to begin by the script
	Commits   int // transactions applied, also where the reply was lost
	Rollbacks int // transactions begun and not applied
}

// New returns a Manager. It panics if cfg is invalid.
func New(cfg Config) *Manager {
	db := newDatabase(cfg)
	inner, err := txretry.NewOver(db, cfg.Retry)
	if err := errors.Join(err, checkScript(cfg.Script)); err != nil {
		panic(err)
	}
	return &Manager{db: db, inner: inner}
}

// Do is txretry.Manager.Do on a fake transaction.
func (m *Manager) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return m.DoWith(ctx, txretry.Options{}, fn)
}

// DoWith is txretry.Manager.DoWith on a fake transaction. Of the options the
// isolation and the timeouts change nothing.
func (m *Manager) DoWith(ctx context.Context, opts txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	if outer, ok := ctx.Value(inside{m}).(*atomic.Bool); fn == nil || ok && outer.Load() {
		return m.inner.DoWith(ctx, opts, fn)
	}
	return m.inner.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		var running atomic.Bool
		running.Store(true)
		defer running.Store(false)
		if err := fn(context.WithValue(ctx, inside{m}, &running), tx); err != nil {
			return err
		}
		return m.db.failEnd()
	})
}

// inside is the context key of what tells a nested call, whose end is not the call's.
type inside struct{ m *Manager }

// Stats returns the counts up to now.
func (m *Manager) Stats() Stats {
	m.db.mu.Lock()
	defer m.db.mu.Unlock()
	return m.db.stats
}
