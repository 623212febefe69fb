package expirypgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/pgnotify"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// channelPrefix begins the name of a table's channel.
const channelPrefix = "holdfast_expiry_"

// NotifierConfig tunes a Notifier. Only Table is required.
type NotifierConfig struct {
	// Schema and Table are as in Config.
	Schema, Table string
	// Interval is the least time between two notifications; of those asked for in
	// between the earliest deadline is sent. 0 means 50 ms.
	Interval time.Duration
	// Logger nil means slog.Default().
	Logger *slog.Logger
}

// Notifier tells the sweepers of other processes that rows were made, and when
// the first of them falls due. Postgres lets one transaction with a NOTIFY commit
// at a time, so that none belongs into a business transaction: a Notifier sends
// its own, after the commit, and few of them. One that is lost costs the time to
// the sweeper's next look. Make it with NewNotifier.
//
//	txretry.AfterCommit(tx, func() { notifier.Notify(deadline) })
type Notifier struct{ notifier *pgnotify.Notifier }

// NewNotifier returns a Notifier; Run sets it to work. It uses one connection of
// the pool, for the time of a statement. A pooler in transaction mode does no harm
// here.
func NewNotifier(pool *pgxpool.Pool, cfg NotifierConfig) (*Notifier, error) {
	table, err := sqlident.Qualify(cfg.Schema, cfg.Table)
	errs := []error{err}
	if pool == nil {
		errs = append(errs, errors.New("pool is nil"))
	}
	if cfg.Interval < 0 {
		errs = append(errs, fmt.Errorf("NotifierConfig.Interval is %v, must not be negative", cfg.Interval))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("expirypgx: NewNotifier: %w", err)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Notifier{pgnotify.NewNotifier(pgnotify.NotifierConfig{
		Channel:  pgnotify.Channel{Pool: pool, Prefix: channelPrefix, Table: table},
		Interval: cmp.Or(cfg.Interval, 50*time.Millisecond),
		Failed: func(ctx context.Context, err error) {
			cfg.Logger.WarnContext(ctx, "expirypgx: sweepers were not notified, they find the rows at their next look", slog.Any("error", err))
		},
	})}, nil
}

// Notify asks for a notification of a row that falls due at that time, the
// deadline as it is stored, or at an unknown one if at is zero. It never blocks,
// and is safe for concurrent use.
func (n *Notifier) Notify(at time.Time) { n.notifier.Notify(at) }

// Run sends notifications until ctx is cancelled, one that was asked for before
// that included. A database that is away is logged and tried again; Run returns
// nil.
func (n *Notifier) Run(ctx context.Context) error {
	n.notifier.Run(ctx)
	return nil
}
