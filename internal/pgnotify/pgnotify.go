// Package pgnotify wakes services in other processes with NOTIFY. Postgres commits transactions with a NOTIFY one at
// a time, so a Sender notifies outside the business transaction, after its commit, and rarely. A lost notification
// costs the time to the next poll.
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

// Channel is the notification channel of one table. It is named after the table's oid, so search paths and other
// names of the table do not matter.
type Channel struct {
	Pool   *pgxpool.Pool
	Prefix string // of the channel's name; the table's oid follows
	Table  string // quoted
}

const (
	// channelSQL also turns off idle_session_timeout, because a listening session is idle by design. Postgres 13 has
	// no such timeout.
	channelSQL = `SELECT $1::text || $2::text::regclass::oid, count(set_config(name, '0', false)) FROM pg_settings WHERE name = 'idle_session_timeout'`
	notifySQL  = `SELECT pg_notify($1::text || $2::text::regclass::oid, $3)`
)

// timeout bounds one notification, and the start of listening.
const timeout = 4 * time.Second

func (c Channel) notify(ctx context.Context, payload string) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return pgcall.Use(ctx, c.Pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		_, err := conn.Exec(ctx, notifySQL, c.Prefix, c.Table, payload)
		return worded(err)
	})
}

// worded adds ErrNoTable to the error of an unknown table.
func worded(err error) error {
	if missing, ok := errors.AsType[*pgconn.PgError](err); ok && missing.Code == undefinedTable {
		return fmt.Errorf("%w: %w", ErrNoTable, err)
	}
	return err
}

// listen returns a listening connection, which belongs to the caller.
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
	_ = conn.Close(ctx) // the connection is dropped either way
}

// payload formats a time; the zero time becomes "".
func payload(at time.Time) string {
	if at.IsZero() {
		return ""
	}
	return at.UTC().Format(time.RFC3339Nano)
}

// moment parses a payload. It returns the zero time for text it cannot parse, such as a format of a later version.
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
	// Interval is the minimum time between two notifications.
	Interval time.Duration
	// Keep is how long a failed notification is retried. 0: it is dropped.
	Keep time.Duration
	// Failed is called when a notification failed, at a limited rate.
	Failed func(ctx context.Context, err error)
}

// Sender sends notifications. Each carries the earliest time passed to Tell since the last one. It needs no Run: its
// one goroutine starts with Tell and ends when an Interval has passed without another call.
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

// Tell requests a notification with the time at; a zero at is an unknown time. It never blocks, and is safe for
// concurrent use.
func (s *Sender) Tell(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.add(at)
	if !s.running {
		s.running = true
		go s.run()
	}
}

// add records a time. The caller holds s.mu.
func (s *Sender) add(at time.Time) {
	if !s.pending || at.Before(s.at) {
		s.pending, s.at = true, at
	}
}

// take returns the time to send. Without one, the goroutine ends.
func (s *Sender) take() (at time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, ok = s.at, s.pending
	s.pending, s.running = false, ok
	return at, ok
}

func (s *Sender) run() {
	var since time.Time // when sending started to fail
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
		case err == nil || isClosed(err): // a closed pool means that the process ends
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

// keep queues a failed time again, unless an earlier one was added meanwhile.
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

// isClosed reports whether err comes from a closed pool: from before the call, as an error text of a package we do
// not import, or from a pool that was closed while it connected. The call's own context is never cancelled.
func isClosed(err error) bool {
	return errors.Is(err, context.Canceled) || strings.Contains(err.Error(), "closed pool")
}

// maxPause bounds the pause between two tries, because a lost database may return at any time.
const maxPause = 2 * time.Second

// ListenerConfig tunes a Listener. All fields are required.
type ListenerConfig struct {
	Channel       Channel
	Wake          func(at time.Time)                   // called for every notification, and after connecting with the zero time
	ProbeInterval time.Duration                        // between two tests of the connection
	Failed        func(ctx context.Context, err error) // called once per period without notifications
}

// Listener receives the notifications of Senders in other processes. It takes a connection out of the pool, and
// briefly one more for each test.
type Listener struct {
	cfg ListenerConfig

	mu    sync.Mutex
	state error // nil: the last test passed
}

var (
	errNotListening = errors.New("the listener is not connected")

	// ErrNoTable means that the table of the channel does not exist.
	ErrNoTable = errors.New("the table does not exist")

	// ErrSwallowed means that notifications do not arrive.
	ErrSwallowed = errors.New("notifications do not arrive: the connection is dead, or a pooler in transaction mode swallows them")
)

// NewListener returns a Listener. It listens during Run.
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

// State returns nil while notifications arrive, otherwise the reason why they do not.
func (l *Listener) State() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state
}

const undefinedTable = "42P01"

// Probe tests on its own connection whether notifications arrive. Its error is ErrNoTable or ErrSwallowed if they do
// not. Any other error means that the test failed twice: a busy server may be too slow once.
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

// session is one connection, from its start to its failure.
func (l *Listener) session(ctx context.Context, works func()) error {
	conn, err := l.cfg.Channel.listen(ctx)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	l.cfg.Wake(time.Time{}) // for rows committed while nobody listened
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
	// probeTimeout bounds a notification to oneself. A dead connection is found within twice ProbeInterval plus this
	// time, because a connection that has just received something is not tested at once.
	probeTimeout = 2500 * time.Millisecond
	// probePrefix distinguishes such a notification from a time.
	probePrefix = "probe "
)

// probe tests a listening connection within probeTimeout.
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

// notifySelf sends a notification on another connection, because a pooler forwards notifications only while the
// connection is in use.
func (l *Listener) notifySelf(ctx context.Context) (token string, err error) {
	token = probePrefix + uuid.NewString()
	return token, l.cfg.Channel.notify(ctx, token)
}

// await waits up to d for the notification with the token.
func (l *Listener) await(ctx context.Context, conn *pgx.Conn, d time.Duration, token string) error {
	_, err := l.receive(ctx, conn, d, token)
	if pgconn.Timeout(err) && ctx.Err() == nil {
		return ErrSwallowed
	}
	return err
}

// receive passes on every notification until the one with the token arrives, or for d if there is no token. It
// reports whether any arrived.
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
