package expirypgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/internal/pgnotify"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// ListenerConfig tunes a Listener. Only Table is required.
type ListenerConfig struct {
	// Schema and Table are as in Config.
	Schema, Table string
	// ProbeInterval is the time between two tests of the connection: the listener
	// notifies itself, unless it has heard from others meanwhile. A connection that
	// is dead is replaced within twice this and 3 s. 0 means 3 s.
	ProbeInterval time.Duration
	// Logger nil means slog.Default().
	Logger *slog.Logger
}

// Listener wakes a sweeper when a Notifier says that rows were made. While it
// cannot, the sweeper finds them at its next look. Make it with NewListener.
type Listener struct {
	listener *pgnotify.Listener
	table    string
}

// NewListener returns a Listener; Run sets it to work. wake is Sweeper.Wake; it
// must not block. The listener takes a connection out of the pool for itself, and
// one more for a moment at each test. The pool must reach Postgres itself, or a
// pooler in session mode.
func NewListener(pool *pgxpool.Pool, wake func(at time.Time), cfg ListenerConfig) (*Listener, error) {
	table, err := sqlident.Qualify(cfg.Schema, cfg.Table)
	errs := []error{err}
	if pool == nil {
		errs = append(errs, errors.New("pool is nil"))
	}
	if wake == nil {
		errs = append(errs, errors.New("wake is nil"))
	}
	if cfg.ProbeInterval < 0 {
		errs = append(errs, fmt.Errorf("ListenerConfig.ProbeInterval is %v, must not be negative", cfg.ProbeInterval))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("expirypgx: NewListener: %w", err)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Listener{table: table, listener: pgnotify.NewListener(pgnotify.ListenerConfig{
		Channel:       pgnotify.Channel{Pool: pool, Prefix: channelPrefix, Table: table},
		Wake:          wake,
		ProbeInterval: cmp.Or(cfg.ProbeInterval, 3*time.Second),
		Failed: func(ctx context.Context, err error) {
			cfg.Logger.WarnContext(ctx, "expirypgx: the sweeper is not woken up, it finds rows at its next look", slog.Any("error", err))
		},
	})}, nil
}

// Run listens until ctx is cancelled. It reconnects with growing pauses, and
// returns nil.
func (l *Listener) Run(ctx context.Context) error {
	l.listener.Run(ctx)
	return nil
}

// Ready returns nil while notifications arrive. An error means that rows made
// elsewhere wait for the sweeper's next look, not that they are lost.
func (l *Listener) Ready(context.Context) error {
	if err := l.listener.State(); err != nil {
		return fmt.Errorf("expirypgx: %w", err)
	}
	return nil
}

// Check tests, with a connection of its own, whether notifications arrive.
func (l *Listener) Check(ctx context.Context) ([]expiry.Finding, error) {
	switch err := l.listener.Probe(ctx); {
	case err == nil:
		return nil, nil
	case errors.Is(err, pgnotify.ErrNoTable):
		return []expiry.Finding{finding("table "+l.table+" does not exist, whose channel is listened to",
			"create it, or correct ListenerConfig.Schema and ListenerConfig.Table")}, nil
	case errors.Is(err, pgnotify.ErrSwallowed):
		return []expiry.Finding{finding("notifications do not arrive, so that sweepers find rows made elsewhere only when they look",
			"give the listener a pool that reaches Postgres itself or a pooler in session mode")}, nil
	default:
		return nil, fmt.Errorf("expirypgx: check: %w", err)
	}
}
