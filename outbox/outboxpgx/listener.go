package outboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgnotify"
)

// ListenerConfig tunes a Listener. The zero value works.
type ListenerConfig struct {
	// Schema and Table are as in SchemaConfig.
	Schema, Table string
	// ProbeInterval is the time between two tests of the connection: the listener notifies
	// itself, unless it has heard from others meanwhile. A connection that is dead is replaced within
	// this and 3 s. Default 5 s.
	ProbeInterval time.Duration
	// Logger nil means slog.Default().
	Logger *slog.Logger
}

// Listener wakes a relay when a Notifier says that messages were committed. While it cannot, the
// relay finds them when it polls.
type Listener struct {
	listener *pgnotify.Listener
	table    string
}

// NewListener returns a Listener; Run sets it to work. wake is Relay.Wake; it must not block. The
// listener takes a connection out of the pool for itself, and one more for a moment at each test. The
// pool must reach Postgres itself, or a pooler in session mode.
func NewListener(pool *pgxpool.Pool, wake func(), cfg ListenerConfig) (*Listener, error) {
	t, err := SchemaConfig{cfg.Schema, cfg.Table}.tables()
	errs := []error{err}
	if pool == nil || wake == nil {
		errs = append(errs, errors.New("outboxpgx: NewListener needs a pool and a wake function"))
	}
	if cfg.ProbeInterval < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: ListenerConfig.ProbeInterval is %v, must not be negative", cfg.ProbeInterval))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Listener{table: t.outbox, listener: pgnotify.NewListener(pgnotify.ListenerConfig{
		Channel:       pgnotify.Channel{Pool: pool, Prefix: channelPrefix, Table: t.outbox},
		Wake:          func(time.Time) { wake() },
		ProbeInterval: cmp.Or(cfg.ProbeInterval, 5*time.Second),
		Failed: func(ctx context.Context, err error) {
			cfg.Logger.WarnContext(ctx, "outboxpgx: the relay is not woken up, it finds messages when it polls", slog.Any("error", err))
		},
	})}, nil
}

// Run listens until ctx is cancelled. It reconnects with growing pauses, and never returns an error
// at present.
func (l *Listener) Run(ctx context.Context) error {
	l.listener.Run(ctx)
	return nil
}

// Ready returns nil while notifications arrive. An error means that messages wait for the relay's
// next poll, not that they are lost.
func (l *Listener) Ready(context.Context) error {
	if err := l.listener.State(); err != nil {
		return fmt.Errorf("outboxpgx: %w", err)
	}
	return nil
}

// Check tests, with a connection of its own, whether notifications arrive.
func (l *Listener) Check(ctx context.Context) ([]Finding, error) {
	switch err := l.listener.Probe(ctx); {
	case err == nil:
		return nil, nil
	case errors.Is(err, pgnotify.ErrNoTable):
		return []Finding{{Component: "outboxpgx", Problem: "table " + l.table + " does not exist, whose channel is listened to", Mend: mendMigrate}}, nil
	case errors.Is(err, pgnotify.ErrSwallowed):
		return []Finding{{
			Component: "outboxpgx", Problem: "notifications do not arrive, so relays find messages only when they poll",
			Mend: "give the listener a pool that reaches Postgres itself or a pooler in session mode",
		}}, nil
	default:
		return nil, fmt.Errorf("outboxpgx: check: %w", err)
	}
}
