package outboxpgx

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// ListenerConfig tunes a Listener. The zero value works.
type ListenerConfig struct {
	// Schema and Table are as in SchemaConfig.
	Schema, Table string
	// ProbeInterval is the time between two tests of the connection: the listener notifies
	// itself. Default 15 s.
	ProbeInterval time.Duration
	// Logger nil means slog.Default().
	Logger *slog.Logger
}

// Listener wakes a relay when a Notifier says that messages were committed. While it cannot, the
// relay finds them when it polls.
type Listener struct {
	pool  *pgxpool.Pool
	wake  func()
	cfg   ListenerConfig
	table string

	mu    sync.Mutex
	state error // nil: the last test went well
}

var (
	errNotListening = errors.New("outboxpgx: the listener has not connected yet")
	errSwallowed    = errors.New("outboxpgx: notifications do not arrive: the connection is dead, or a pooler in transaction mode swallows them")
)

// NewListener returns a Listener; Run sets it to work. wake is Relay.Wake; it must not block. The
// listener takes a connection out of the pool for itself, and one more for a moment at each test. The
// pool must reach Postgres itself, or a pooler in session mode.
func NewListener(pool *pgxpool.Pool, wake func(), cfg ListenerConfig) (*Listener, error) {
	if cfg.ProbeInterval == 0 {
		cfg.ProbeInterval = 15 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	t, err := SchemaConfig{cfg.Schema, cfg.Table}.tables()
	errs := []error{err}
	if pool == nil || wake == nil {
		errs = append(errs, errors.New("outboxpgx: NewListener needs a pool and a wake function"))
	}
	if cfg.ProbeInterval < 0 {
		errs = append(errs, fmt.Errorf("outboxpgx: ListenerConfig.ProbeInterval is %v, want more than 0", cfg.ProbeInterval))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Listener{pool: pool, wake: wake, cfg: cfg, table: t.outbox, state: errNotListening}, nil
}

// Run listens until ctx is cancelled. It reconnects with growing pauses, and never returns an error
// at present.
func (l *Listener) Run(ctx context.Context) error {
	between := backoff.Policy{Base: 50 * time.Millisecond, Max: 15 * time.Second, Jitter: 0.5}
	failures := 0
	for ctx.Err() == nil {
		err := l.session(ctx, func() { failures = 0 })
		if ctx.Err() != nil {
			return nil
		}
		l.setState(err)
		l.cfg.Logger.WarnContext(ctx, "outboxpgx: the relay is not woken up, it finds messages when it polls", slog.Any("error", err))
		_ = runloop.Sleep(ctx, between.Delay(failures, rand.Float64())) // ends early only with ctx
		failures++
	}
	return nil
}

// Ready returns nil while notifications arrive. An error means that messages wait for the relay's
// next poll, not that they are lost.
func (l *Listener) Ready(context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state
}

const undefinedTable = "42P01"

// Check tests, with a connection of its own, whether notifications arrive.
func (l *Listener) Check(ctx context.Context) ([]Finding, error) {
	conn, err := l.listen(ctx)
	if missing, ok := errors.AsType[*pgconn.PgError](err); ok && missing.Code == undefinedTable {
		return []Finding{{Component: "outboxpgx", Problem: "table " + l.table + " does not exist, whose channel is listened to", Mend: mendMigrate}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("outboxpgx: check: %w", err)
	}
	defer hangUp(conn)
	err = l.probe(ctx, conn)
	if errors.Is(err, errSwallowed) {
		return []Finding{{
			Component: "outboxpgx", Problem: "notifications do not arrive, so relays find messages only when they poll",
			Mend: "give the listener a pool that reaches Postgres itself or a pooler in session mode",
		}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("outboxpgx: check: %w", err)
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
	l.wake() // for what was committed while nobody listened
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

// probeTimeout is how long a notification to oneself may take.
const probeTimeout = 2 * time.Second

// probe sends a notification over another connection, since a pooler passes on what arrives while
// the connection is in use.
func (l *Listener) probe(ctx context.Context, conn *pgx.Conn) error {
	token := uuid.NewString()
	if err := notify(ctx, l.pool, l.table, token); err != nil {
		return err
	}
	err := l.receive(ctx, conn, probeTimeout, token)
	if pgconn.Timeout(err) && ctx.Err() == nil {
		return errSwallowed
	}
	return err
}

// receive wakes the relay for every notification until the one with the token arrives; without a
// token, for d.
func (l *Listener) receive(ctx context.Context, conn *pgx.Conn, d time.Duration, token string) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for {
		n, err := conn.WaitForNotification(ctx)
		switch {
		case err != nil:
			return err
		case n.Payload == "":
			l.wake()
		case n.Payload == token:
			return nil
		}
	}
}

func (l *Listener) setState(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = err
}
