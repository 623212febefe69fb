package inboxamqp

import (
	"context"
	"sync"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/joined"
	"github.com/holdfast-go/holdfast/internal/amqpconn"
	"github.com/holdfast-go/holdfast/internal/partition"
)

// partitions is the source of a partitioned consumer. Its sessions have one of each partition, on one
// connection. Copies and dead letters are the same for all, and base's.
type partitions struct {
	*joined.Source
	base  *source
	parts []*part
	conn  *amqpconn.Conn // of the sessions; Open sets it for the parts
}

var (
	_ driver.Source = (*partitions)(nil)
	_ driver.Keeper = (*partitions)(nil)
)

func newPartitions(base *source) *partitions {
	p := &partitions{base: base}
	var all []driver.Source
	for _, queue := range partition.Names(base.cfg.queue, base.cfg.Partitions) {
		one := &part{source: base.of(queue), whole: p}
		p.parts, all = append(p.parts, one), append(all, one)
	}
	p.Source = joined.New(all...)
	return p
}

// Run implements driver.Source.
func (p *partitions) Run(ctx context.Context) { p.base.Run(ctx) }

// Ready implements driver.Source.
func (p *partitions) Ready(ctx context.Context) error { return p.base.Ready(ctx) }

// DeadLetters implements driver.Keeper.
func (p *partitions) DeadLetters() driver.DeadLetters { return p.base.DeadLetters() }

// Open implements driver.Source: it dials, and begins a session of each partition.
func (p *partitions) Open(ctx context.Context) (driver.Session, error) {
	conn, err := amqpconn.Open(ctx, p.base.dial, p.base.cfg.Timeout)
	if err != nil {
		return nil, err
	}
	release := bound(ctx, conn)
	opened, err := p.begin(ctx, conn)
	release()
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	s := &partSession{Session: opened, src: p, conn: conn}
	leveling, halt := context.WithCancel(context.WithoutCancel(ctx))
	s.halt = halt
	s.leveling.Go(func() { p.level(leveling, conn) })
	return s, nil
}

func (p *partitions) begin(ctx context.Context, conn *amqpconn.Conn) (driver.Session, error) {
	if err := conn.Watch(p.base.silence.pending); err != nil {
		return nil, err
	}
	if err := p.base.cfg.missingExchange(conn); err != nil {
		return nil, err
	}
	if err := p.enlist(conn); err != nil {
		return nil, err
	}
	p.conn = conn
	return p.Source.Open(ctx)
}

// part is the source of one partition.
type part struct {
	*source
	whole *partitions
	lane  *lane // of the session that was opened last
}

// Open implements driver.Source on the connection of the whole.
func (p *part) Open(context.Context) (driver.Session, error) {
	l := &lane{src: p.source, conn: p.whole.conn}
	if err := l.attach(); err != nil {
		return nil, err
	}
	p.lane = l
	return l, nil
}

// partSession is a session of all partitions.
type partSession struct {
	driver.Session
	src      *partitions
	conn     *amqpconn.Conn
	halt     context.CancelFunc
	leveling sync.WaitGroup
}

// Close implements driver.Session.
func (s *partSession) Close(ctx context.Context) error {
	s.halt()
	s.leveling.Wait()
	err := s.Session.Close(ctx)
	s.conn.Close()
	received := false
	for _, part := range s.src.parts {
		received = received || part.lane.current().intake.received
	}
	s.src.base.silence.note(s.conn.Silent() && !received)
	return err
}
