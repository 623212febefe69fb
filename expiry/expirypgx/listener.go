package expirypgx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// ListenerConfig tunes a Listener. Only Table is required.
type ListenerConfig struct {
	// Schema and Table are as in Config.
	Schema, Table string
	// ProbeInterval is the time between two tests of the connection: the listener
	// notifies itself. 0 means 5 minutes; the sweeper's Recheck bounds what a
	// connection that died in between can cost.
	ProbeInterval time.Duration
	// Logger nil means slog.Default().
	Logger *slog.Logger
}

// Listener wakes a sweeper when a Notifier says that rows were made. While it
// cannot, the sweeper finds them at its next look. Make it with NewListener.
type Listener struct {
	pool  *pgxpool.Pool
	wake  func(at time.Time)
	cfg   ListenerConfig
	table string

	mu    sync.Mutex
	state error // nil: the last test went well
}

var (
	errNotListening = errors.New("expirypgx: the listener has not connected yet")
	errSwallowed    = errors.New("expirypgx: notifications do not arrive: the connection is dead, or a pooler in transaction mode swallows them")
)

// NewListener returns a Listener; Run sets it to work. wake is Sweeper.Wake; it
// must not block. The listener takes a connection out of the pool for itself, and
// one more for a moment at each test. The pool must reach Postgres itself, or a
// pooler in session mode.
func NewListener(pool *pgxpool.Pool, wake func(at time.Time), cfg ListenerConfig) (*Listener, error) {
	if cfg.ProbeInterval == 0 {
		cfg.ProbeInterval = 5 * time.Minute
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
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
	return &Listener{pool: pool, wake: wake, cfg: cfg, table: table, state: errNotListening}, nil
}

// Run listens until ctx is cancelled. It reconnects with growing pauses, and
// returns nil.
func (l *Listener) Run(ctx context.Context) error {
	failures := 0
	for ctx.Err() == nil {
		err := l.session(ctx, func() { failures = 0 })
		if ctx.Err() != nil {
			return nil
		}
		l.setState(err)
		l.cfg.Logger.WarnContext(ctx, "expirypgx: the sweeper is not woken up, it finds rows at its next look", slog.Any("error", err))
		_ = runloop.Sleep(ctx, between.Delay(failures, rand.Float64())) // ends early only with ctx
		failures++
	}
	return nil
}

// Ready returns nil while notifications arrive. An error means that rows made
// elsewhere wait for the sweeper's next look, not that they are lost.
func (l *Listener) Ready(context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state
}

// Check tests, with a connection of its own, whether notifications arrive.
func (l *Listener) Check(ctx context.Context) ([]expiry.Finding, error) {
	conn, err := l.listen(ctx)
	if err != nil {
		return nil, fmt.Errorf("expirypgx: check: %w", err)
	}
	defer hangUp(conn)
	err = l.probe(ctx, conn)
	if errors.Is(err, errSwallowed) {
		return []expiry.Finding{finding("notifications do not arrive, so that sweepers find rows made elsewhere only when they look",
			"give the listener a pool that reaches Postgres itself or a pooler in session mode")}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("expirypgx: check: %w", err)
	}
	return nil, nil
}

// session is one connection, from its begin to its failure.
func (l *Listener) session(ctx context.Context, works func()) error {
	conn, err := l.listen(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	l.wake(time.Time{}) // for what was committed while nobody listened
	for {
		if err := l.probe(ctx, conn); err != nil {
			return err
		}
		l.setState(nil)
		works()
		if err := l.receive(ctx, conn, l.cfg.ProbeInterval, ""); !pgconn.Timeout(err) {
			return err
		}
	}
}

// listen returns a connection that belongs to the caller, and listens.
func (l *Listener) listen(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, notifyTimeout)
	defer cancel()
	pooled, err := l.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	conn := pooled.Hijack()
	var channel string
	if err = conn.QueryRow(ctx, channelSQL, l.table).Scan(&channel); err == nil {
		_, err = conn.Exec(ctx, "LISTEN "+pgx.Identifier{channel}.Sanitize())
	}
	if err != nil {
		hangUp(conn)
		return nil, err
	}
	return conn, nil
}

func hangUp(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // it is of no use either way
}

const (
	// probeTimeout is how long a notification to oneself may take.
	probeTimeout = 2 * time.Second
	// probePrefix tells such a notification from a deadline.
	probePrefix = "probe "
)

// probe sends a notification over another connection, since a pooler passes on
// what arrives while the connection is in use.
func (l *Listener) probe(ctx context.Context, conn *pgx.Conn) error {
	token := probePrefix + uuid.NewString()
	if err := notify(ctx, l.pool, l.table, token); err != nil {
		return err
	}
	err := l.receive(ctx, conn, probeTimeout, token)
	if pgconn.Timeout(err) && ctx.Err() == nil {
		return errSwallowed
	}
	return err
}

// receive wakes the sweeper for every notification until the one with the token
// arrives; without a token, for d.
func (l *Listener) receive(ctx context.Context, conn *pgx.Conn, d time.Duration, token string) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for {
		n, err := conn.WaitForNotification(ctx)
		switch {
		case err != nil:
			return err
		case n.Payload == token && token != "":
			return nil
		case !strings.HasPrefix(n.Payload, probePrefix):
			l.wake(deadline(n.Payload))
		}
	}
}

func (l *Listener) setState(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = err
}
