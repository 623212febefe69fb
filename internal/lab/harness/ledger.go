package harness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Deed is what a committed transaction did for one message: the message must arrive, in place N of its key, from 1.
type Deed struct {
	ID  uuid.UUID
	Key string
	N   int64
}

// Ledger notes which messages reach the broker, in order. Its methods are safe for concurrent use.
type Ledger struct {
	mu         sync.Mutex
	excused    map[uuid.UUID]bool
	deliveries []uuid.UUID
	arrived    map[uuid.UUID]bool
}

// NewLedger returns an empty ledger.
func NewLedger() *Ledger {
	return &Ledger{excused: map[uuid.UUID]bool{}, arrived: map[uuid.UUID]bool{}}
}

// Excuse takes messages whose absence is no fault of the shop.
func (l *Ledger) Excuse(ids ...uuid.UUID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		l.excused[id] = true
	}
}

func (l *Ledger) deliver(id uuid.UUID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deliveries = append(l.deliveries, id)
	l.arrived[id] = true
}

// Missing counts the messages of deeds that have not arrived and are not excused.
func (l *Ledger) Missing(deeds []Deed) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range deeds {
		if !l.arrived[d.ID] && !l.excused[d.ID] {
			n++
		}
	}
	return n
}

// Verdict is the result of an audit.
type Verdict struct {
	Committed, Delivered, Lost int
	Duplicates                 int // deliveries after the first
	Faults                     []string
}

func (v Verdict) String() string {
	return fmt.Sprintf("%d committed, %d delivered, %d lost, %d duplicates", v.Committed, v.Delivered, v.Lost, v.Duplicates)
}

// Audit compares the arrivals with the deeds: everything that committed arrived, nothing else did, and the first arrivals of
// each key came in the order of its commits.
func (l *Ledger) Audit(deeds []Deed) Verdict {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := books{ledger: l, deeds: map[uuid.UUID]Deed{}, at: map[position]uuid.UUID{}, newest: map[string]int64{}, quoted: map[string]int{}}
	b.Committed, b.Delivered = len(deeds), len(l.deliveries)
	for _, d := range deeds {
		b.deeds[d.ID] = d
		b.at[position{d.Key, d.N}] = d.ID
	}
	b.order()
	for id, d := range b.deeds {
		if !l.arrived[id] && !l.excused[id] {
			b.Lost++
			b.fault("lost", "%s, %d of key %q", id, d.N, d.Key)
		}
	}
	return b.Verdict
}

// books are an audit under way.
type books struct {
	Verdict
	ledger *Ledger
	deeds  map[uuid.UUID]Deed
	at     map[position]uuid.UUID
	newest map[string]int64 // by key, of what has arrived
	quoted map[string]int
}

type position struct {
	key string
	n   int64
}

// maxFaults bounds how many faults of each kind an audit quotes.
const maxFaults = 5

func (b *books) fault(kind, format string, args ...any) {
	if b.quoted[kind]++; b.quoted[kind] <= maxFaults {
		b.Faults = append(b.Faults, kind+": "+fmt.Sprintf(format, args...))
	}
}

func (b *books) order() {
	before := make(map[uuid.UUID]bool, len(b.ledger.arrived))
	for _, id := range b.ledger.deliveries {
		d, ok := b.deeds[id]
		switch {
		case !ok && b.ledger.excused[id]:
			continue
		case !ok:
			b.fault("never committed, yet delivered", "%s", id)
			continue
		case before[id]:
			b.Duplicates++
		default:
			b.first(d)
		}
		before[id] = true
	}
}

func (b *books) first(d Deed) {
	if d.N < b.newest[d.Key] {
		b.fault("out of order", "key %s: %d arrived after %d", d.Key, d.N, b.newest[d.Key])
		return
	}
	for n := b.newest[d.Key] + 1; n < d.N; n++ {
		if !b.ledger.excused[b.at[position{d.Key, n}]] {
			b.fault("out of order", "key %s: %d arrived before %d", d.Key, d.N, n)
		}
	}
	b.newest[d.Key] = d.N
}

// Dial opens a connection to a broker, within the time of ctx.
type Dial func(ctx context.Context) (*amqp.Connection, error)

// At dials url. It waits for a slow broker; the client's heartbeats end a silent connection after 15 seconds.
func At(url string) Dial {
	return func(ctx context.Context) (*amqp.Connection, error) {
		return amqp.DialConfig(url, amqp.Config{Dial: func(network, addr string) (net.Conn, error) {
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err == nil {
				err = conn.SetDeadline(time.Now().Add(testenv.Patience)) // of the handshake; the client removes it
			}
			return conn, err
		}})
	}
}

func (d Dial) do(ctx context.Context, do func(*amqp.Channel) error) error {
	conn, err := d(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = conn.CloseDeadline(time.Now().Add(2 * time.Second)) }() // late or not, it is closed
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	return do(ch)
}

// observe writes all messages of a queue into the ledger, over any number of connections, until ctx ends.
func (l *Ledger) observe(ctx context.Context, dial Dial, queue string) {
	for ctx.Err() == nil {
		_ = dial.do(ctx, func(ch *amqp.Channel) error { return l.session(ctx, ch, queue) }) // then the next connection
		_ = runloop.Sleep(ctx, 50*time.Millisecond)
	}
}

func (l *Ledger) session(ctx context.Context, ch *amqp.Channel, queue string) error {
	if err := ch.Qos(100, 0, false); err != nil {
		return err
	}
	deliveries, err := ch.Consume(queue, "", false, false, false, false, nil)
	if err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case d, open := <-deliveries:
			if !open {
				return errors.New("the broker ended the session")
			}
			id, err := uuid.Parse(d.MessageId)
			if err != nil {
				return err
			}
			l.deliver(id)
			if err := d.Ack(false); err != nil {
				return err
			}
		}
	}
}
