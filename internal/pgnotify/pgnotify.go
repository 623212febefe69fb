// Package pgnotify wakes services of other processes by NOTIFY, apart from the
// transactions that give the reason: Postgres commits one transaction with a NOTIFY
// at a time, so a Sender sends its own, after the commit, and few of them. A
// notification that is lost costs the time to the next poll.
package pgnotify

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// Channel is where the notifications of one table go: it belongs to the table,
// whatever name or search path leads to it.
type Channel struct {
	Pool   *pgxpool.Pool
	Prefix string // of the channel's name, before the table's oid
	Table  string // quoted
}

const (
	// channelSQL also keeps the server from ending the session: one that listens is idle by design. Postgres 13 has no
	// such timeout.
	channelSQL = `SELECT $1::text || $2::text::regclass::oid, count(set_config(name, '0', false)) FROM pg_settings WHERE name = 'idle_session_timeout'`
	notifySQL  = `SELECT pg_notify($1::text || $2::text::regclass::oid, $3)`
)

// timeout bounds one notification, and the begin of listening.
const timeout = 4 * time.Second

func (c Channel) notify(ctx context.Context, payload string) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return pgcall.Use(ctx, c.Pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		_, err := conn.Exec(ctx, notifySQL, c.Prefix, c.Table, payload)
		return worded(err)
	})
}

// worded says what it means that a table's channel is not known.
func worded(err error) error {
	if missing, ok := errors.AsType[*pgconn.PgError](err); ok && missing.Code == undefinedTable {
		return fmt.Errorf("%w: %w", ErrNoTable, err)
	}
	return err
}

// listen returns a connection that belongs to the caller, and listens.
func (c Channel) listen(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	conn, err := pgcall.Take(ctx, c.Pool)
	if err != nil {
		return nil, err
	}
	var name string
	if err = conn.QueryRow(ctx, channelSQL, c.Prefix, c.Table).Scan(&name, nil); err == nil {
		_, err = conn.Exec(ctx, "LISTEN "+pgx.Identifier{name}.Sanitize())
	}
	if err != nil {
		hangUp(conn)
		return nil, worded(err)
	}
	return conn, nil
}

func hangUp(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // it is of no use either way
}

// payload is a time as text; the zero time is empty.
func payload(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return at.UTC().Format(time.RFC3339Nano)
}

// moment is what payload made. What it does not understand, from a version to
// come, is an unknown time.
func moment(payload string) time.Time {
	at, err := time.Parse(time.RFC3339Nano, payload)
	if err != nil {
		return time.Time{}
	}
	return at
}

// SenderConfig tunes a Sender.
type SenderConfig struct {
	Channel Channel
	// Interval is the least time between two notifications.
	Interval time.Duration
	// Keep is how long a notification that cannot be sent is tried again. Default: it
	// is dropped.
	Keep time.Duration
	// Failed is called now and then when a notification was not sent.
	Failed func(ctx context.Context, err error)
}

// Sender sends notifications, each with the earliest of the times that Tell was
// given since the last one. It needs no Run: its one goroutine lives from a call of
// Tell until an Interval has passed without a further one.
type Sender struct {
	cfg        SenderConfig
	complaints telemetry.Seldom

	mu      sync.Mutex
	running bool
	pending bool
	at      time.Time
}

// NewSender returns a Sender.
func NewSender(cfg SenderConfig) *Sender { return &Sender{cfg: cfg} }

// Tell asks for a notification about a time, or an unknown one if at is zero. It
// never blocks, and is safe for concurrent use.
func (s *Sender) Tell(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.add(at)
	if !s.running {
		s.running = true
		go s.run()
	}
}

// add notes a time; s.mu is held.
func (s *Sender) add(at time.Time) {
	if !s.pending || at.Before(s.at) {
		s.pending, s.at = true, at
	}
}

// take returns what is to be sent. If that is nothing, the goroutine ends.
func (s *Sender) take() (at time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, ok = s.at, s.pending
	s.pending, s.running = false, ok
	return at, ok
}

func (s *Sender) run() {
	var since time.Time // when sending began to fail
	failures := 0
	between := backoff.Policy{Base: 50 * time.Millisecond, Max: maxPause, Jitter: 0.5}
	for {
		at, ok := s.take()
		if !ok {
			return
		}
		begun := time.Now()
		pause := s.cfg.Interval
		err := s.cfg.Channel.notify(context.Background(), payload(at))
		switch {
		case err == nil || isClosed(err): // nobody waits for word of a process that ends
			failures = 0
		default:
			s.complain(err)
			if failures == 0 {
				since = begun
			}
			if time.Since(since) < s.cfg.Keep {
				s.keep(at)
			}
			pause = max(pause, between.Delay(failures, rand.Float64()))
			failures++
		}
		time.Sleep(pause - time.Since(begun))
	}
}

// keep has a time sent again, unless an earlier one has come meanwhile.
func (s *Sender) keep(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.add(at)
}

func (s *Sender) complain(err error) {
	if _, ok := s.complaints.Due(); ok {
		s.cfg.Failed(context.Background(), err)
	}
}

// isClosed recognises the errors of a pool that was closed: before the call, from a
// package that is no dependency of ours, or while it connected. The call's own context
// is never cancelled.
func isClosed(err error) bool {
	return errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "closed pool")
}

// maxPause is how long a database that is away is left alone: it may be back at any time.
const maxPause = 2 * time.Second

// ListenerConfig tunes a Listener. All fields are required.
type ListenerConfig struct {
	Channel       Channel
	Wake          func(at time.Time)                   // called for every notification, and after connecting with the zero time
	ProbeInterval time.Duration                        // between two tests of the connection
	Failed        func(ctx context.Context, err error) // called once for each time in which notifications do not arrive
}

// Listener hands on what Senders of other processes send. It takes a connection
// out of the pool for itself, and one more for a moment at each test.
type Listener struct {
	cfg ListenerConfig

	mu    sync.Mutex
	state error // nil: the last test went well
}

var (
	errNotListening = errors.New("the listener is not connected")

	// ErrNoTable is what Probe returns where the table does not exist whose channel
	// is listened to.
	ErrNoTable = errors.New("the table does not exist")

	// ErrSwallowed is what Probe returns where notifications do not arrive.
	ErrSwallowed = errors.New("notifications do not arrive: the connection is dead, or a pooler in transaction mode swallows them")
)

// NewListener returns a Listener; Run sets it to work.
func NewListener(cfg ListenerConfig) *Listener {
	return &Listener{cfg: cfg, state: errNotListening}
}

// Run listens until ctx is cancelled. It reconnects with growing pauses.
func (l *Listener) Run(ctx context.Context) {
	defer l.setState(errNotListening)
	between := backoff.Policy{Base: 50 * time.Millisecond, Max: maxPause, Jitter: 0.5}
	failures, told := 0, false
	for ctx.Err() == nil {
		err := l.session(ctx, func() { failures, told = 0, false })
		if ctx.Err() != nil {
			return
		}
		l.setState(err)
		if !told {
			l.cfg.Failed(ctx, err)
			told = true
		}
		_ = runloop.Sleep(ctx, between.Delay(failures, rand.Float64())) // ends early only with ctx
		failures++
	}
}

// State returns nil while notifications arrive, else why they do not.
func (l *Listener) State() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state
}

const undefinedTable = "42P01"

// Probe tests, with a connection of its own, whether notifications arrive. If they
// do not, its error is ErrNoTable or ErrSwallowed; any other says that it could not
// test it, not even by a second try: a busy server may once take too long.
func (l *Listener) Probe(ctx context.Context) error {
	err := l.probeOnce(ctx)
	if err == nil || errors.Is(err, ErrNoTable) || errors.Is(err, ErrSwallowed) || ctx.Err() != nil {
		return err
	}
	return l.probeOnce(ctx)
}

func (l *Listener) probeOnce(ctx context.Context) error {
	conn, err := l.cfg.Channel.listen(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	token, err := l.notifySelf(ctx)
	if err != nil {
		return err
	}
	return l.await(ctx, conn, probeTimeout, token)
}

// session is one connection, from its begin to its failure.
func (l *Listener) session(ctx context.Context, works func()) error {
	conn, err := l.cfg.Channel.listen(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	l.cfg.Wake(time.Time{}) // for what was committed while nobody listened
	heard := false
	for {
		if !heard {
			if err := l.probe(ctx, conn); err != nil {
				return err
			}
		}
		l.setState(nil)
		works()
		if heard, err = l.receive(ctx, conn, l.cfg.ProbeInterval, ""); !pgconn.Timeout(err) {
			return err
		}
	}
}

const (
	// probeTimeout is how long a notification to oneself may take. A connection is found dead within
	// this and twice ProbeInterval: one that has just heard something is not tested at once.
	probeTimeout = 2500 * time.Millisecond
	// probePrefix tells such a notification from a time.
	probePrefix = "probe "
)

// probe tests a connection that listens, all within probeTimeout.
func (l *Listener) probe(ctx context.Context, conn *pgx.Conn) error {
	end := time.Now().Add(probeTimeout)
	bounded, cancel := context.WithDeadline(ctx, end)
	defer cancel()
	token, err := l.notifySelf(bounded)
	if err != nil {
		return err
	}
	return l.await(ctx, conn, time.Until(end), token)
}

// notifySelf sends a notification over another connection, since a pooler passes on
// what arrives while the connection is in use.
func (l *Listener) notifySelf(ctx context.Context) (token string, err error) {
	token = probePrefix + uuid.NewString()
	return token, l.cfg.Channel.notify(ctx, token)
}

// await waits for d until the notification with the token arrives.
func (l *Listener) await(ctx context.Context, conn *pgx.Conn, d time.Duration, token string) error {
	_, err := l.receive(ctx, conn, d, token)
	if pgconn.Timeout(err) && ctx.Err() == nil {
		return ErrSwallowed
	}
	return err
}

// receive hands on every notification until the one with the token arrives;
// without a token, for d. It returns whether there was any.
func (l *Listener) receive(ctx context.Context, conn *pgx.Conn, d time.Duration, token string) (heard bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return heard, err
		}
		heard = true
		switch {
		case n.Payload == token && token != "":
			return heard, nil
		case !strings.HasPrefix(n.Payload, probePrefix):
			l.cfg.Wake(moment(n.Payload))
		}
	}
}

func (l *Listener) setState(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = err
}
