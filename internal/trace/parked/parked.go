// Package parked records the consumers of an inbox with inbox.ConsumerConfig.ParkKeys, and accepts the runs that
// parked.pml of internal/lab/models allows. The messages of a key take effect once and in order. A dead letter stops its
// key until an operator has replayed or removed it. No message is acknowledged before it has taken effect or is kept.
package parked

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/trace"
)

// The transitions, with their names in parked.pml.
const (
	deliver = "deliver"
	commit  = "commit"
	stop    = "stop"
	wait    = "wait"
	ack     = "ack"
	replay  = "replay"
	remove  = "remove"
)

// Transitions are the names of the transitions. Not seen from outside are the claims of a drain, the failures of its
// messages, and the moment at which a key without messages is free.
var Transitions = []string{deliver, commit, stop, wait, ack, replay, remove}

// key is the state of an ordering key. Its messages have the numbers 0 to PerKey-1. Steps copy it.
type key struct {
	delivered, entered uint64 // sets of messages; entered are processed or removed
	parked             []row
	stopped            bool // it may be free already if parked is empty
}

type row struct {
	number int
	dead   bool
}

func bit(number int) uint64 { return 1 << number }

// at returns the place of a message among the parked ones, or -1.
func (k key) at(number int) int {
	return slices.IndexFunc(k.parked, func(r row) bool { return r.number == number })
}

func (k key) has(number int) bool { return k.entered&bit(number) != 0 }

func (k key) without(at int) key {
	k.parked = slices.Delete(slices.Clone(k.parked), at, at+1)
	return k
}

func (k key) with(r row) key {
	k.parked, k.stopped = append(slices.Clip(k.parked), r), true
	return k
}

func (k key) deliver(number int) []key {
	k.delivered |= bit(number)
	return []key{k}
}

// commit is the entry with the effect: the first one of the message, and all earlier messages have theirs. A message
// that was delivered runs if its key is free, a parked one if it is the first of its key and no dead letter.
func (k key) commit(number int) []key {
	if k.entered != bit(number)-1 {
		return nil
	}
	switch at := k.at(number); {
	case at > 0 || at == 0 && k.parked[0].dead:
		return nil
	case at == 0:
		k = k.without(0)
	case len(k.parked) > 0 || k.delivered&bit(number) == 0:
		return nil
	default:
		k.stopped = false
	}
	k.entered |= bit(number)
	return []key{k}
}

// stop keeps a dead letter. It waits if the key is stopped already.
func (k key) stop(number int) []key {
	switch {
	case k.has(number) || k.at(number) >= 0:
		return []key{k}
	case len(k.parked) > 0:
		return []key{k.with(row{number, false})}
	case k.stopped: // the key may be free
		return []key{k.with(row{number, false}), k.with(row{number, true})}
	}
	return []key{k.with(row{number, true})}
}

// wait is the end of a delivery without an effect: a copy of a message that is processed or kept, or a message that
// waits because its key is stopped.
func (k key) wait(number int) []key {
	switch {
	case k.has(number) || k.at(number) >= 0:
		return []key{k}
	case k.stopped:
		return []key{k.with(row{number, false})}
	}
	return nil
}

func (k key) ack(number int) []key {
	if !k.has(number) && k.at(number) < 0 {
		return nil
	}
	return []key{k}
}

func (k key) replay(number int) []key {
	at := k.at(number)
	if at < 0 {
		return nil
	}
	k.parked = slices.Clone(k.parked)
	k.parked[at].dead = false
	return []key{k}
}

// remove deletes a dead letter and makes its entry.
func (k key) remove(number int) []key {
	at := k.at(number)
	if at < 0 {
		return nil
	}
	k = k.without(at)
	k.entered |= bit(number)
	return []key{k}
}

// event is the body of a message. It names the message in the model.
type event struct {
	Key    string `json:"key"`
	Number int    `json:"number"`
}

func eventOf(m *inbox.Message) (e event) {
	if err := json.Unmarshal(m.Body, &e); err != nil {
		panic(fmt.Sprintf("parked: a message of another test: %s", m.Body))
	}
	return e
}

// Log is the run of all consumers of a queue.
type Log struct {
	trace *trace.Log[key]

	mu        sync.Mutex
	committed map[event]bool
}

// NewLog returns an empty Log.
func NewLog() *Log { return &Log{trace: trace.New[key](Transitions...), committed: map[event]bool{}} }

func (l *Log) add(e event, name string, from int, step func(key) []key) {
	l.trace.Add(e.Key, name, fmt.Sprint(e.Number), from, step)
}

// commits records that a transaction that began at from has committed.
func (l *Log) commits(e event, from int) {
	l.mu.Lock()
	l.committed[e] = true
	l.mu.Unlock()
	l.add(e, commit, from, func(k key) []key { return k.commit(e.Number) })
}

func (l *Log) has(e event) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.committed[e]
}

// Check returns an error if parked.pml does not allow the run, or if a key with these messages is not done.
func (l *Log) Check(perKey int) error {
	return l.trace.Check(key{}, func(k key) bool { return k.entered == bit(perKey)-1 && len(k.parked) == 0 })
}

// source records the deliveries and acknowledgements of a consumer.
type source struct {
	driver.Source
	log *Log
}

func (s source) Open(ctx context.Context) (driver.Session, error) {
	opened, err := s.Source.Open(ctx)
	if err != nil {
		return nil, err
	}
	return session{opened, s.log}, nil
}

type session struct {
	driver.Session
	log *Log
}

func (s session) Receive(ctx context.Context, most int) ([]driver.Delivery, error) {
	from := s.log.trace.Now()
	ds, err := s.Session.Receive(ctx, most)
	for _, d := range ds {
		e := eventOf(d.Message())
		s.log.add(e, deliver, from, func(k key) []key { return k.deliver(e.Number) })
	}
	return ds, err
}

// Ack records acknowledgements that fail, too: none may be sent too early.
func (s session) Ack(ctx context.Context, ds []driver.Delivery, mayWait bool) error {
	from := s.log.trace.Now()
	err := s.Session.Ack(ctx, ds, mayWait)
	for _, d := range ds {
		e := eventOf(d.Message())
		s.log.add(e, ack, from, func(k key) []key { return k.ack(e.Number) })
	}
	return err
}

// processor records the messages that are kept.
type processor struct {
	*inboxpgx.Store
	log *Log
}

func (p *processor) Process(ctx context.Context, msgs []*inbox.Message) []error {
	from := p.log.trace.Now()
	results := p.Store.Process(ctx, msgs)
	for i, m := range msgs {
		if e := eventOf(m); results[i] == nil && !p.log.has(e) {
			p.log.add(e, wait, from, func(k key) []key { return k.wait(e.Number) })
		}
	}
	return results
}

func (p *processor) Stop(ctx context.Context, dead inbox.DeadLetter) error {
	from := p.log.trace.Now()
	err := p.Store.Stop(ctx, dead)
	if e := eventOf(&dead.Message); err == nil {
		p.log.add(e, stop, from, func(k key) []key { return k.stop(e.Number) })
	}
	return err
}
