package expirypgx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

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
type Notifier struct {
	pool  *pgxpool.Pool
	cfg   NotifierConfig
	table string
	ring  chan struct{}

	mu      sync.Mutex
	pending bool
	at      time.Time
}

// NewNotifier returns a Notifier; Run sets it to work. It uses one connection of
// the pool, for the time of a statement. A pooler in transaction mode does no harm
// here.
func NewNotifier(pool *pgxpool.Pool, cfg NotifierConfig) (*Notifier, error) {
	if cfg.Interval == 0 {
		cfg.Interval = 50 * time.Millisecond
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
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
	return &Notifier{pool: pool, cfg: cfg, table: table, ring: make(chan struct{}, 1)}, nil
}

// Notify asks for a notification of a row that falls due at that time, the
// deadline as it is stored, or at an unknown one if at is zero. It never blocks,
// and is safe for concurrent use.
func (n *Notifier) Notify(at time.Time) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.pending || at.Before(n.at) {
		n.pending, n.at = true, at
	}
	select {
	case n.ring <- struct{}{}:
	default:
	}
}

func (n *Notifier) take() (at time.Time, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	at, ok = n.at, n.pending
	n.pending = false
	return at, ok
}

// notifyTimeout bounds one notification, and with it the end of Run.
const notifyTimeout = 5 * time.Second

// Run sends notifications until ctx is cancelled, one that was asked for before
// that included. A database that is away is logged and tried again; Run returns
// nil.
func (n *Notifier) Run(ctx context.Context) error {
	work, cancel := runloop.Detach(ctx, notifyTimeout)
	defer cancel()
	failures := 0
	for {
		at, ok := n.next(ctx)
		if !ok {
			return nil
		}
		pause := n.cfg.Interval
		if err := notify(work, n.pool, n.table, payload(at)); err != nil {
			n.cfg.Logger.WarnContext(ctx, "expirypgx: sweepers were not notified, they find the rows at their next look", slog.Any("error", err))
			pause = max(pause, between.Delay(failures, rand.Float64()))
			failures++
			n.Notify(at)
		} else {
			failures = 0
		}
		if runloop.Sleep(ctx, pause) != nil && failures > 0 {
			return nil
		}
	}
}

// next waits until a notification is asked for. It returns false when none is and
// ctx has ended.
func (n *Notifier) next(ctx context.Context) (at time.Time, ok bool) {
	for {
		if at, ok := n.take(); ok {
			return at, true
		}
		select {
		case <-n.ring:
		case <-ctx.Done():
			return n.take()
		}
	}
}

// between are the pauses after failures of notifier and listener.
var between = backoff.Policy{Base: 50 * time.Millisecond, Max: 15 * time.Second, Jitter: 0.5}

// The channel belongs to the table, whatever name or search path leads to it.
const (
	channelSQL = `SELECT 'holdfast_expiry_' || $1::text::regclass::oid`
	notifySQL  = `SELECT pg_notify('holdfast_expiry_' || $1::text::regclass::oid, $2)`
)

func notify(ctx context.Context, pool *pgxpool.Pool, table, payload string) error {
	ctx, cancel := context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	_, err := pool.Exec(ctx, notifySQL, table, payload)
	return err
}

// payload is a deadline as text; the zero time is empty.
func payload(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return at.UTC().Format(time.RFC3339Nano)
}

// deadline is what payload made. What it does not understand, from a version to
// come, is a row that falls due at an unknown time.
func deadline(payload string) time.Time {
	at, err := time.Parse(time.RFC3339Nano, payload)
	if err != nil {
		return time.Time{}
	}
	return at
}
