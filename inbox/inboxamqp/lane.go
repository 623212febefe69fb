package inboxamqp

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	// yieldPatience is how long a partition that is to be given up waits for its messages in hand. One
	// that waits for a retry keeps it here.
	yieldPatience = 5 * time.Second
	// yieldPoll is how often it is looked whether they are settled.
	yieldPoll = 20 * time.Millisecond
)

// lane is a driver.Session of one partition, which can be given up: its channel is closed and another
// one opened, behind those of other processes. Whoever receives does that.
type lane struct {
	src     *source
	conn    *amqpconn.Conn
	window  int
	serving atomic.Bool // the broker has sent messages since it was subscribed to

	mu      sync.Mutex
	session *session
	yields  bool               // it is to be given up
	rouse   context.CancelFunc // ends the Receive under way
}

// attach begins a session on the connection.
func (l *lane) attach() error {
	s, err := l.src.attach(l.conn)
	if err != nil {
		return err
	}
	s.shared = true
	l.serving.Store(false)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.session = s
	return nil
}

func (l *lane) current() *session {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.session
}

// Start implements driver.Session.
func (l *lane) Start(ctx context.Context, window int) error {
	l.window = window
	return l.current().Start(ctx, window)
}

// Receive implements driver.Session.
func (l *lane) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	for {
		turn, yields := l.turn(ctx)
		if yields {
			if err := l.yield(ctx); err != nil {
				return nil, err
			}
			continue
		}
		ds, err := l.current().Receive(turn, most)
		if len(ds) > 0 {
			l.serving.Store(true)
			return ds, err
		}
		if turn.Err() == nil || ctx.Err() != nil {
			return nil, err
		}
	}
}

// turn begins one Receive, or says that the partition is to be given up instead.
func (l *lane) turn(ctx context.Context) (turn context.Context, yields bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.rouse != nil {
		l.rouse()
	}
	turn, l.rouse = context.WithCancel(ctx)
	yields, l.yields = l.yields, false
	return turn, yields
}

// giveUp has whoever receives leave the partition to another process.
func (l *lane) giveUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.yields = true
	if l.rouse != nil {
		l.rouse()
	}
}

// yield closes the channel, once all messages in hand are settled, and lines up again behind the other
// processes. It closes none while messages are in hand: two processes would work on them.
func (l *lane) yield(ctx context.Context) error {
	s := l.current()
	for end := time.Now().Add(yieldPatience); s.tags.open() > len(s.intake.kept); {
		if time.Now().After(end) || runloop.Sleep(ctx, yieldPoll) != nil {
			return nil
		}
	}
	l.src.cfg.Logger.InfoContext(ctx, "partition given up to another process", slog.String("partition", l.src.queue))
	whole := context.WithoutCancel(ctx) // each call is bounded
	if err := s.Close(whole); err != nil {
		return err
	}
	if err := l.attach(); err != nil {
		return err
	}
	return l.Start(whole, l.window)
}

// Ack implements driver.Session.
func (l *lane) Ack(ctx context.Context, ds []driver.Delivery, mayWait bool) error {
	return l.current().Ack(ctx, ds, mayWait)
}

// GiveBack implements driver.Session.
func (l *lane) GiveBack(ctx context.Context, ds []driver.Delivery) error {
	return l.current().GiveBack(ctx, ds)
}

// Stop implements driver.Session.
func (l *lane) Stop(ctx context.Context) error { return l.current().Stop(ctx) }

// Close implements driver.Session.
func (l *lane) Close(ctx context.Context) error { return l.current().Close(ctx) }
