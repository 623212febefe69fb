package silent

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Notices is the time after which the broker detects the end of a silent connection and redelivers its messages.
const Notices = 20 * time.Second

// AMQP is a broker that falls silent. It must be used in the bubble that made it. It knows queues, the
// default exchange and exchanges that route to all their queues, confirms, returns, prefetch and redelivery.
type AMQP struct {
	network

	// Delay returns how long a message for an exchange waits before it goes to the queue named by its key. It gets
	// the payload of the message's header frame. 0: the message is routed at once.
	Delay func(exchange string, header []byte) time.Duration

	broker  sync.Mutex // guards the other fields, and the fields of queues and channels
	queues  map[string]*queue
	bound   map[string][]string // queues by exchange
	blocked chan struct{}       // closed by Unblock; nil: the broker reads
}

type queue struct {
	messages  []*message
	consumers []*consumer
}

type message struct {
	queue, exchange, key string
	redelivered          bool
	header, body         []byte // payloads of the header frame and the body frames
	mandatory            bool
}

type consumer struct {
	ch    *channel
	tag   string
	queue string
}

type channel struct {
	link      *link
	id        uint16
	confirms  bool
	published uint64
	prefetch  int
	unacked   map[uint64]*message
	delivered uint64
	incoming  *message
	missing   uint64 // bytes of its body
}

// link is a connection on the broker's side.
type link struct {
	*AMQP
	conn     *conn
	channels map[uint16]*channel
	informed bool // that the broker is blocked

	out chan []byte // for the client, which may read slowly
}

// NewAMQP returns a broker without queues.
func NewAMQP(t testing.TB) *AMQP {
	s := &AMQP{queues: map[string]*queue{}, bound: map[string][]string{}}
	s.init(t)
	t.Cleanup(s.Unblock)
	return s
}

// Dial opens a connection whose heartbeats notice nothing during a test.
func (s *AMQP) Dial(context.Context) (*amqp.Connection, error) {
	return amqp.DialConfig("amqp://guest:guest@127.0.0.1:1/", amqp.Config{
		Heartbeat: time.Hour,
		Dial: func(string, string) (net.Conn, error) {
			c, err := s.dial(s.serve)
			if err != nil {
				return nil, err
			}
			return c, c.SetDeadline(time.Now().Add(time.Hour)) // the client removes it after the handshake
		},
	})
}

// Queue makes a queue, and binds it to an exchange unless that is "".
func (s *AMQP) Queue(name, exchange string) {
	s.broker.Lock()
	defer s.broker.Unlock()
	s.queues[name] = &queue{}
	if exchange != "" {
		s.bound[exchange] = append(s.bound[exchange], name)
	}
}

// Depth returns how many messages of a queue are ready for delivery.
func (s *AMQP) Depth(name string) int {
	s.broker.Lock()
	defer s.broker.Unlock()
	if q := s.queues[name]; q != nil {
		return len(q.messages)
	}
	return 0
}

// Block makes the broker stop reading from publishing connections and notify them, as under a memory alarm.
func (s *AMQP) Block() {
	s.broker.Lock()
	defer s.broker.Unlock()
	s.blocked = make(chan struct{})
}

// Unblock ends Block.
func (s *AMQP) Unblock() {
	s.broker.Lock()
	defer s.broker.Unlock()
	if s.blocked != nil {
		close(s.blocked)
		s.blocked = nil
	}
}

func (s *AMQP) serve(c *conn) error {
	l := &link{AMQP: s, conn: c, channels: map[uint16]*channel{}, out: make(chan []byte, 10_000)}
	go func() {
		for {
			select {
			case <-c.done:
				return
			case data := <-l.out:
				_ = c.answer(data)
			}
		}
	}()
	defer l.end()
	header := make([]byte, 8)
	if _, err := io.ReadFull(c, header); err != nil {
		return err
	}
	if c.arrives(header) {
		l.send(0, 10, 10, uint8(0), uint8(9), long(""), long("PLAIN"), long("en_US")) // it has no properties
	}
	for {
		frame := make([]byte, 7, 64)
		if _, err := io.ReadFull(c, frame); err != nil {
			return err
		}
		frame = append(frame, make([]byte, binary.BigEndian.Uint32(frame[3:])+1)...)
		if _, err := io.ReadFull(c, frame[7:]); err != nil {
			return err
		}
		if !c.arrives(frame) {
			continue
		}
		l.handle(frame[0], binary.BigEndian.Uint16(frame[1:]), frame[7:len(frame)-1])
	}
}

// end requeues the connection's messages once the broker knows that the connection has ended.
func (l *link) end() {
	l.conn.network.mu.Lock()
	lossy := l.conn.lossy
	l.conn.network.mu.Unlock()
	requeue := func() {
		l.broker.Lock()
		defer l.broker.Unlock()
		for _, ch := range l.channels {
			l.leave(ch)
		}
	}
	if lossy {
		time.AfterFunc(Notices, requeue)
		return
	}
	requeue()
}

type long string

// send queues a method for the client.
func (l *link) send(channel uint16, class, method uint16, args ...any) {
	l.out <- encode(channel, class, method, args...)
}

func encode(channel uint16, class, method uint16, args ...any) []byte {
	payload := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, class), method)
	for _, arg := range args {
		switch arg := arg.(type) {
		case string:
			payload = append(append(payload, byte(len(arg))), arg...)
		case long:
			payload = append(binary.BigEndian.AppendUint32(payload, uint32(len(arg))), arg...)
		case []byte:
			payload = append(payload, arg...)
		default:
			payload, _ = binary.Append(payload, binary.BigEndian, arg)
		}
	}
	return pack(1, channel, payload)
}

func pack(kind byte, channel uint16, payload []byte) []byte {
	data := binary.BigEndian.AppendUint16([]byte{kind}, channel)
	data = binary.BigEndian.AppendUint32(data, uint32(len(payload)))
	return append(append(data, payload...), 0xCE)
}

// args reads the arguments of a method.
type args struct{ rest []byte }

func (a *args) take(n int) []byte {
	if n > len(a.rest) {
		n = len(a.rest)
	}
	taken := a.rest[:n]
	a.rest = a.rest[n:]
	return taken
}

func (a *args) number(bytes int) (n uint64) {
	for _, b := range a.take(bytes) {
		n = n<<8 | uint64(b)
	}
	return n
}

func (a *args) text() string { return string(a.take(int(a.number(1)))) }

func (l *link) handle(kind byte, id uint16, payload []byte) {
	l.broker.Lock()
	defer l.broker.Unlock()
	ch := l.channels[id]
	switch kind {
	case 1:
		l.method(ch, id, binary.BigEndian.Uint16(payload), binary.BigEndian.Uint16(payload[2:]), &args{payload[4:]})
		return
	case 2:
		ch.incoming.header, ch.missing = bytes.Clone(payload), binary.BigEndian.Uint64(payload[4:])
	case 3:
		ch.incoming.body = append(ch.incoming.body, payload...)
		ch.missing -= uint64(len(payload))
	}
	if kind != 8 && ch.missing == 0 {
		l.publish(ch)
	}
}

func (l *link) method(ch *channel, id, class, method uint16, a *args) {
	reply := func(values ...any) { l.send(id, class, method+1, values...) }
	switch class<<8 | method {
	case 10<<8 | 11: // start-ok
		l.send(id, 10, 30, uint16(2047), uint32(131072), uint16(0)) // no heartbeats of its own
	case 10<<8 | 40, 20<<8 | 10: // open
		if class == 20 {
			l.channels[id] = &channel{link: l, id: id, unacked: map[uint64]*message{}}
			reply(long(""))
			break
		}
		reply("")
	case 20<<8 | 40:
		l.leave(ch)
		delete(l.channels, id)
		reply()
	case 50<<8 | 10:
		a.number(2)
		name := a.text()
		bits := a.number(1)
		q := l.queues[name]
		if q == nil && bits&1 != 0 { // passive
			l.send(id, 20, 40, uint16(404), "NOT_FOUND - no queue", class, method)
			break
		}
		if q == nil {
			q = &queue{}
			l.queues[name] = q
		}
		reply(name, uint32(len(q.messages)), uint32(len(q.consumers)))
	case 50<<8 | 20:
		a.number(2)
		name, exchange := a.text(), a.text()
		if !slices.Contains(l.bound[exchange], name) {
			l.bound[exchange] = append(l.bound[exchange], name)
		}
		reply()
	case 60<<8 | 10:
		a.number(4)
		ch.prefetch = int(a.number(2))
		reply()
	case 60<<8 | 20:
		a.number(2)
		c := &consumer{ch: ch, queue: a.text(), tag: a.text()}
		q := l.queues[c.queue]
		q.consumers = append(q.consumers, c)
		reply(c.tag)
		l.deliver(q)
	case 60<<8 | 30:
		tag := a.text()
		for _, q := range l.queues {
			q.consumers = slices.DeleteFunc(q.consumers, func(c *consumer) bool { return c.ch == ch && c.tag == tag })
		}
		reply(tag)
	case 60<<8 | 40:
		l.waitUnblocked()
		a.number(2)
		ch.incoming = &message{exchange: a.text(), key: a.text(), mandatory: a.number(1)&1 != 0}
	case 60<<8 | 80, 60<<8 | 90, 60<<8 | 120:
		tag := a.number(8)
		bits := a.number(1)
		l.settle(ch, tag, method != 90 && bits&1 != 0, method == 90 && bits&1 != 0 || method == 120 && bits&2 != 0)
	case 60<<8 | 70: // get: a queue has none for it
		l.send(id, 60, 72, "")
	case 85<<8 | 10:
		ch.confirms = true
		reply()
	case 10<<8 | 31, 20<<8 | 41, 10<<8 | 51: // tune-ok, close-ok
	default: // close, and exchanges and bindings that the broker need not know
		reply()
	}
}

// waitUnblocked blocks the connection while the broker is blocked.
func (l *link) waitUnblocked() {
	for l.blocked != nil {
		blocked := l.blocked
		if !l.informed {
			l.send(0, 10, 60, "low on memory")
			l.informed = true
		}
		l.broker.Unlock()
		<-blocked
		l.broker.Lock()
	}
	if l.informed {
		l.send(0, 10, 61)
		l.informed = false
	}
}

// publish routes an arrived message and confirms it.
func (l *link) publish(ch *channel) {
	m := ch.incoming
	ch.incoming = nil
	if !l.route(m) && m.mandatory {
		l.send(ch.id, 60, 50, uint16(312), "NO_ROUTE", m.exchange, m.key)
		l.content(ch.id, m)
	}
	if ch.confirms {
		ch.published++
		l.send(ch.id, 60, 80, ch.published, uint8(0))
	}
}

func (l *link) content(id uint16, m *message) {
	l.out <- pack(2, id, m.header)
	if len(m.body) > 0 {
		l.out <- pack(3, id, m.body)
	}
}

func (s *AMQP) route(m *message) (routed bool) {
	if s.Delay != nil && m.exchange != "" {
		if delay := s.Delay(m.exchange, m.header); delay > 0 {
			time.AfterFunc(delay, func() { s.expire(m) })
			return true
		}
	}
	names := s.bound[m.exchange]
	if m.exchange == "" {
		names = []string{m.key}
	}
	for _, name := range names {
		q := s.queues[name]
		if q == nil {
			continue
		}
		routed = true
		copied := *m
		copied.queue = name
		q.messages = append(q.messages, &copied)
		s.deliver(q)
	}
	return routed
}

func (s *AMQP) expire(m *message) {
	s.broker.Lock()
	defer s.broker.Unlock()
	m.exchange = ""
	s.route(m)
}

// deliver gives messages to the consumers of a queue in turn.
func (s *AMQP) deliver(q *queue) {
	for len(q.messages) > 0 {
		i := slices.IndexFunc(q.consumers, func(c *consumer) bool { return c.ch.prefetch == 0 || len(c.ch.unacked) < c.ch.prefetch })
		if i < 0 {
			return
		}
		c, m := q.consumers[i], q.messages[0]
		q.messages = q.messages[1:]
		q.consumers = append(slices.Delete(q.consumers, i, i+1), c)
		c.ch.delivered++
		c.ch.unacked[c.ch.delivered] = m
		redelivered := uint8(0)
		if m.redelivered {
			redelivered = 1
		}
		c.ch.link.send(c.ch.id, 60, 60, c.tag, c.ch.delivered, redelivered, m.exchange, m.key)
		c.ch.link.content(c.ch.id, m)
	}
}

func (s *AMQP) settle(ch *channel, tag uint64, multiple, requeue bool) {
	for n := uint64(1); n <= tag; n++ {
		if m := ch.unacked[n]; m != nil && (n == tag || multiple) {
			delete(ch.unacked, n)
			if requeue {
				s.requeue(m)
			}
			s.deliver(s.queues[m.queue])
		}
	}
}

func (s *AMQP) requeue(m *message) {
	m.redelivered = true
	q := s.queues[m.queue]
	q.messages = slices.Insert(q.messages, 0, m)
}

// leave ends the consumers of a channel and requeues its messages.
func (s *AMQP) leave(ch *channel) {
	for _, q := range s.queues {
		q.consumers = slices.DeleteFunc(q.consumers, func(c *consumer) bool { return c.ch == ch })
	}
	for n := ch.delivered; n > 0; n-- {
		if m := ch.unacked[n]; m != nil {
			s.requeue(m)
		}
	}
	clear(ch.unacked)
	for _, q := range s.queues {
		s.deliver(q)
	}
}
