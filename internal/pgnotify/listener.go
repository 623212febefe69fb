package pgnotify

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

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
