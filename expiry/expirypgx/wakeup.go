package expirypgx

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgcheck"
	"github.com/holdfast-go/holdfast/internal/pgnotify"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

const (
	// channelPrefix begins the name of a table's channel.
	channelPrefix = "holdfast_expiry_"
	// notifyInterval is the least time between two notifications of one Store.
	notifyInterval = 50 * time.Millisecond
	// keepNotifying is how long a notification that fails is tried again. Sweepers look
	// by themselves within that time.
	keepNotifying = 90 * time.Second
	// probeInterval is the time between two tests of the connection that listens.
	probeInterval = 3 * time.Second
	// farOff is when a deadline need not be announced: sweepers look every 90 s at
	// least, and this host's clock may be ten minutes behind the server's.
	farOff = 2*90*time.Second + 10*time.Minute
)

// Due says that the transaction makes or changes a row that falls due at that time.
// After the commit the sweepers of this process know at once, those of other
// processes within milliseconds: the Store sends them a NOTIFY in a transaction of
// its own, at most one per 50 ms, since Postgres lets one transaction with a NOTIFY
// commit at a time. A deadline more than thirteen minutes away is not announced to
// other processes, whose sweepers find it by themselves.
//
// Due returns false if tx is not one of a txretry.Manager, such as a transaction of
// the pool: call Wake after its commit.
func (s *Store) Due(tx pgx.Tx, deadline time.Time) bool {
	return txdriver.Hint(tx, func() { s.Wake(deadline) })
}

// Wake does at once what Due does after a commit. The deadline is the one that is
// stored; zero means an unknown time. Wake never blocks.
func (s *Store) Wake(deadline time.Time) {
	s.sweepers.Wake(deadline)
	if !s.cfg.PollOnly && (deadline.IsZero() || time.Until(deadline) < farOff) {
		s.sender.Tell(deadline)
	}
}

// Background implements expiry/driver.Background. It wakes a sweeper of this process,
// until ctx ends. Of several sweepers on one Store the first listens to other
// processes for all of them; the next takes over from it. The connection that
// listens is taken out of the pool, in addition to the pool's maximum.
func (s *Store) Background(ctx context.Context, wake func(at time.Time)) {
	defer s.sweepers.Add(wake)()
	wake(time.Time{}) // for rows of this process since the sweeper's first look
	s.warnOfHidden(ctx)
	if s.cfg.PollOnly {
		<-ctx.Done()
		return
	}
	select {
	case s.listening <- struct{}{}:
		defer func() { <-s.listening }()
	case <-ctx.Done():
		return
	}
	s.listener.Run(ctx)
}

// warnOfHidden logs once that row-level security hides rows: a sweeper that sees none has nothing to do, and nobody else
// would notice.
func (s *Store) warnOfHidden(ctx context.Context) {
	found := check.Findings{Component: "expirypgx"}
	err := pgcall.Within(ctx, s.pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return pgcheck.Hidden(ctx, conn, &found, s.qualified())
	})
	if hidden := found.Err(); err == nil && hidden != nil {
		s.cfg.Logger.WarnContext(ctx, "expirypgx: rows are hidden from the sweeper", slog.String("table", s.table()), slog.Any("error", hidden))
	}
}

// connect makes what sends and receives notifications. Both are at rest until they
// are used.
func (s *Store) connect(table string) {
	channel := pgnotify.Channel{Pool: s.pool, Prefix: channelPrefix, Table: table}
	warn := func(message string) func(context.Context, error) {
		return func(ctx context.Context, err error) {
			s.cfg.Logger.WarnContext(ctx, "expirypgx: "+message, slog.String("table", s.table()), slog.Any("error", err))
		}
	}
	s.listening = make(chan struct{}, 1)
	s.sender = pgnotify.NewSender(pgnotify.SenderConfig{
		Channel: channel, Interval: notifyInterval, Keep: keepNotifying,
		Failed: warn("sweepers of other processes were not notified, they find the rows when they look"),
	})
	s.listener = pgnotify.NewListener(pgnotify.ListenerConfig{
		Channel: channel, Wake: s.sweepers.Wake, ProbeInterval: probeInterval,
		Failed: warn("the sweeper is not notified, it finds rows of other processes when it looks"),
	})
}
