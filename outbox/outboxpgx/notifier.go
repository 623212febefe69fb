package outboxpgx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

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
type Notifier struct {
	pool    *pgxpool.Pool
	cfg     NotifierConfig
	table   string
	pending chan struct{}
}

// NewNotifier returns a Notifier; Run sets it to work. It uses one connection of the pool, for
// the time of a statement. A pooler in transaction mode does no harm here.
func NewNotifier(pool *pgxpool.Pool, cfg NotifierConfig) (*Notifier, error) {
	if cfg.Interval == 0 {
		cfg.Interval = 2 * time.Millisecond
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	t, err := SchemaConfig{cfg.Schema, cfg.Table}.tables()
	errs := []error{err}
	if pool == nil {
		errs = append(errs, errors.New("outboxpgx: NewNotifier needs a pool"))
	}
	if cfg.Interval < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: NotifierConfig.Interval is %v, want more than 0", cfg.Interval))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Notifier{pool: pool, cfg: cfg, table: t.outbox, pending: make(chan struct{}, 1)}, nil
}

// Notify asks for a notification. It never blocks, and is safe for concurrent use.
func (n *Notifier) Notify() {
	select {
	case n.pending <- struct{}{}:
	default:
	}
}

// notifyTimeout bounds one notification, and with it the end of Run.
const notifyTimeout = 5 * time.Second

// Run sends notifications until ctx is cancelled, one that was asked for before that included. A
// database that is away is logged and tried again; Run never returns an error at present.
func (n *Notifier) Run(ctx context.Context) error {
	work, cancel := runloop.Detach(ctx, notifyTimeout)
	defer cancel()
	between := backoff.Policy{Base: 50 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.5}
	failures := 0
	for n.wait(ctx) {
		pause := n.cfg.Interval
		if err := notify(work, n.pool, n.table, ""); err != nil {
			n.cfg.Logger.WarnContext(ctx, "outboxpgx: relays were not notified, they find the messages when they poll", slog.Any("error", err))
			pause = max(pause, between.Delay(failures, rand.Float64()))
			failures++
			n.Notify()
		} else {
			failures = 0
		}
		if runloop.Sleep(ctx, pause) != nil && failures > 0 {
			return nil
		}
	}
	return nil
}

// wait returns true when a notification is asked for, and false when none is and ctx has ended.
func (n *Notifier) wait(ctx context.Context) bool {
	select {
	case <-n.pending:
		return true
	default:
	}
	select {
	case <-n.pending:
		return true
	case <-ctx.Done():
		return false
	}
}

// The channel belongs to the table, whatever name or search path leads to it. An empty payload
// means that there are messages.
const (
	channelSQL = `SELECT 'holdfast_outbox_' || $1::text::regclass::oid`
	notifySQL  = `SELECT pg_notify('holdfast_outbox_' || $1::text::regclass::oid, $2)`
)

func notify(ctx context.Context, pool *pgxpool.Pool, table, payload string) error {
	ctx, cancel := context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	_, err := pool.Exec(ctx, notifySQL, table, payload)
	return err
}
