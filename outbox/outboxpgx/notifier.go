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

// channelPrefix begins the name of a table's channel.
const channelPrefix = "holdfast_outbox_"

// NotifierConfig tunes a Notifier. The zero value works.
type NotifierConfig struct {
	// Schema and Table are as in SchemaConfig.
	Schema, Table string
	// Interval is the least time between two notifications; those asked for in between become one.
	// Default 2 ms.
	Interval time.Duration
	// Logger nil means slog.Default().
	Logger *slog.Logger
}

// Notifier tells the relays of other processes that messages were committed. Postgres lets one
// transaction with a NOTIFY commit at a time, so that none belongs into a business transaction: a
// Notifier sends its own, after the commit, and few of them. One that is lost costs the time to the
// relay's next poll.
//
// Give its Notify to WriterConfig.OnCommit, and a Listener to the relay.
type Notifier struct{ notifier *pgnotify.Notifier }

// NewNotifier returns a Notifier; Run sets it to work. It uses one connection of the pool, for
// the time of a statement. A pooler in transaction mode does no harm here.
func NewNotifier(pool *pgxpool.Pool, cfg NotifierConfig) (*Notifier, error) {
	t, err := SchemaConfig{cfg.Schema, cfg.Table}.tables()
	errs := []error{err}
	if pool == nil {
		errs = append(errs, errors.New("outboxpgx: NewNotifier needs a pool"))
	}
	if cfg.Interval < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: NotifierConfig.Interval is %v, must not be negative", cfg.Interval))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Notifier{pgnotify.NewNotifier(pgnotify.NotifierConfig{
		Channel:  pgnotify.Channel{Pool: pool, Prefix: channelPrefix, Table: t.outbox},
		Interval: cmp.Or(cfg.Interval, 2*time.Millisecond),
		Failed: func(ctx context.Context, err error) {
			cfg.Logger.WarnContext(ctx, "outboxpgx: relays were not notified, they find the messages when they poll", slog.Any("error", err))
		},
	})}, nil
}

// Notify asks for a notification. It never blocks, and is safe for concurrent use.
func (n *Notifier) Notify() { n.notifier.Notify(time.Time{}) }

// Run sends notifications until ctx is cancelled, one that was asked for before that included. A
// database that is away is logged and tried again; Run never returns an error at present.
func (n *Notifier) Run(ctx context.Context) error {
	n.notifier.Run(ctx)
	return nil
}
