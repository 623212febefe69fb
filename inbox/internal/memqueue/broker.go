package memqueue

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// The limits of brokers: RabbitMQ's frame bounds the headers, and its short strings the names.
const (
	maxBodyBytes   = driver.MaxBodyBytes
	maxNameBytes   = 255
	maxHeaderBytes = 128 << 10
)

// Broker is a set of queues. It is safe for concurrent use.
type Broker struct {
	mu      sync.Mutex
	queues  []*Queue
	changed chan struct{} // closed at the next change of any queue; nil if nobody waits
}

// NewBroker returns a Broker without queues.
func NewBroker() *Broker { return &Broker{} }

// Queue is one queue with the copies that wait for a retry and the dead letters of its consumer. The broker's
// lock guards it.
type Queue struct {
	broker  *Broker
	name    string
	classes []string // with a dead-letter queue of their own

	missing   bool
	exclusive bool
	hands     []*hand    // of the started sessions, in that order
	last      int64      // the place of the last message
	ready     []*entry   // by their places
	delayed   []*delayed // messages that wait for a retry, or are put off, in the order in which they began to wait
	unsettled int
	dead      map[string][]*deadLetter // by class, oldest first
	refused   map[string]bool          // classes whose dead-letter queue rejects messages
}

// entry is one copy of a message in a queue. Its place keeps the order if it is requeued.
type entry struct {
	place int64
	msg   *inbox.Message
}

// Queue returns the queue with a name, and creates it at the first call. These classes and the usual ones
// have dead-letter queues of their own.
func (b *Broker) Queue(name string, classes ...string) *Queue {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := driver.AllClasses(classes)
	for _, q := range b.queues {
		if q.name == name {
			q.classes = driver.AllClasses(append(all, q.classes...))
			return q
		}
	}
	q := &Queue{broker: b, name: name, classes: all, dead: map[string][]*deadLetter{}, refused: map[string]bool{}}
	b.queues = append(b.queues, q)
	return q
}

// Idle waits until every queue is empty, with no message that waits for a retry or is unsettled. It returns
// ctx's error if ctx ends first.
func (b *Broker) Idle(ctx context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for slices.ContainsFunc(b.queues, busy) {
		if err := b.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

func busy(q *Queue) bool { return len(q.ready)+len(q.delayed)+q.unsettled > 0 }

// wait releases the lock until something changes or ctx ends.
func (b *Broker) wait(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if b.changed == nil {
		b.changed = make(chan struct{}) // created here, because a channel belongs to the bubble of the waiting goroutine
	}
	changed := b.changed
	b.mu.Unlock()
	defer b.mu.Lock()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// change wakes all waiting goroutines. The lock is held.
func (b *Broker) change() {
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
}

// Put puts a copy of a message at the end of the queue, as a new message. Like brokers it rejects a body over
// 16 MiB, a name over 255 bytes and headers over 128 KiB.
func (q *Queue) Put(m *inbox.Message) error {
	if err := refuse(m); err != nil {
		return err
	}
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	if q.missing {
		return fmt.Errorf("queue %s: %w", q.name, driver.ErrMissing)
	}
	q.append(q.fresh(m))
	return nil
}

func refuse(m *inbox.Message) error {
	headers := 0
	for name, value := range m.Headers {
		headers += len(name) + len(value)
	}
	switch {
	case len(m.Body) > maxBodyBytes:
		return fmt.Errorf("body has %d bytes, at most %d are allowed", len(m.Body), maxBodyBytes)
	case len(m.Name) > maxNameBytes:
		return fmt.Errorf("name has %d bytes, at most %d are allowed", len(m.Name), maxNameBytes)
	case headers > maxHeaderBytes:
		return fmt.Errorf("headers have %d bytes, at most %d are allowed", headers, maxHeaderBytes)
	}
	return nil
}

// fresh returns a copy of a message as a new message.
func (q *Queue) fresh(m *inbox.Message) *inbox.Message {
	c := clone(m)
	c.Queue, c.Attempt, c.Recovered, c.Redelivered = q.name, 1, 0, false
	c.FirstFailedAt, c.History = time.Time{}, nil
	return c
}

func clone(m *inbox.Message) *inbox.Message {
	c := *m
	c.Body, c.Headers, c.History = bytes.Clone(m.Body), maps.Clone(m.Headers), slices.Clone(m.History)
	return &c
}

// append puts a message at the end. The lock is held.
func (q *Queue) append(m *inbox.Message) {
	q.last++
	q.ready = append(q.ready, &entry{place: q.last, msg: m})
	q.broker.change()
}

// back returns a delivered entry to its place. The lock is held.
func (q *Queue) back(e *entry) {
	e.msg.Redelivered = true
	at, _ := slices.BinarySearchFunc(q.ready, e.place, func(other *entry, place int64) int {
		return int(other.place - place)
	})
	q.ready = slices.Insert(q.ready, at, e)
	q.broker.change()
}

// delayed is a message that waits for a time.
type delayed struct {
	msg    *inbox.Message
	putOff bool
	due    time.Time
	timer  *time.Timer
}

// later puts a message at the end after a delay. The lock is held.
func (q *Queue) later(m *inbox.Message, delay time.Duration, putOff bool) {
	if delay <= 0 {
		q.append(m)
		return
	}
	d := &delayed{msg: m, putOff: putOff, due: time.Now().Add(delay)}
	q.delayed = append(q.delayed, d)
	d.timer = time.AfterFunc(delay, func() {
		q.broker.mu.Lock()
		defer q.broker.mu.Unlock()
		if q.undelay(d) {
			q.append(d.msg)
		}
	})
}

// undelay removes a delayed message and reports whether it was there. The lock is held.
func (q *Queue) undelay(d *delayed) bool {
	i := slices.Index(q.delayed, d)
	if i < 0 {
		return false
	}
	d.timer.Stop()
	q.delayed = slices.Delete(q.delayed, i, i+1)
	return true
}

// keepDead adds the dead letter of a message with its place. Dead letters of the same time keep the order of
// their places, whichever is moved first. The lock is held.
func (q *Queue) keepDead(dead inbox.DeadLetter, place int64) error {
	class := q.place(dead.Class)
	if q.refused[class] {
		return fmt.Errorf("class %s: %w", class, driver.ErrRefused)
	}
	dead.Message = *clone(&dead.Message)
	at, _ := slices.BinarySearchFunc(q.dead[class], place, func(other *deadLetter, place int64) int {
		return cmp.Or(other.FailedAt.Compare(dead.FailedAt), cmp.Compare(other.place, place))
	})
	q.dead[class] = slices.Insert(q.dead[class], at, &deadLetter{DeadLetter: dead, place: place})
	q.broker.change()
	return nil
}

// place returns the class whose queue gets the dead letters of a class.
func (q *Queue) place(class string) string {
	if slices.Contains(q.classes, class) {
		return class
	}
	return driver.ClassDefault
}

// Refuse makes the dead-letter queue of a class reject messages, or accept them again.
func (q *Queue) Refuse(class string, on bool) {
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	q.refused[q.place(class)] = on
}

var errCut = errors.New("the connection was cut")

// Cut ends all sessions of the queue, like a lost connection: unsettled messages are redelivered.
func (q *Queue) Cut() {
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	cut(q, errCut)
}

func cut(q *Queue, err error) {
	for _, h := range slices.Clone(q.hands) {
		h.lose(err)
	}
}

// Delete ends all sessions and deletes the queue with its messages, not its dead letters.
func (q *Queue) Delete() {
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	cut(q, fmt.Errorf("queue %s: %w", q.name, driver.ErrMissing))
	for _, d := range q.delayed {
		d.timer.Stop()
	}
	q.missing, q.ready, q.delayed = true, nil, nil
	q.broker.change()
}

// Declare creates a deleted queue again. Copies that waited for a retry when it was deleted are lost.
func (q *Queue) Declare() {
	q.broker.mu.Lock()
	defer q.broker.mu.Unlock()
	q.missing = false
}

// Backlog implements driver.Measured.
func (s *Source) Backlog(ctx context.Context) (driver.Backlog, error) {
	s.queue.broker.mu.Lock()
	defer s.queue.broker.mu.Unlock()
	backlog := driver.Backlog{Waiting: len(s.queue.ready)}
	for _, d := range s.queue.delayed {
		if d.putOff {
			backlog.PutOff++
		} else {
			backlog.Retrying++
		}
	}
	return backlog, ctx.Err()
}
