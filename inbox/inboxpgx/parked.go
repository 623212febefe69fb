package inboxpgx

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/holdfast-go/holdfast/inbox"
	inboxdriver "github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/inbox/internal/base"
	"github.com/holdfast-go/holdfast/internal/telemetry"
)

// Stopped keys.
//
// With inbox.ConsumerConfig.ParkKeys a dead letter stops its ordering key. It is stored in the tables of the
// Store and not in the broker's dead-letter queue. The statement that makes the entry of a message makes none
// if the key is stopped: no handler runs, and the message is stored behind the dead letter. That costs a
// message of a free key no round trip.
//
// When the dead letter is replayed or dropped, a Store with a running consumer claims the key and processes
// its messages. One transaction locks the key's row, makes the entry of the message and runs the handler.
// After that the message is deleted. A message that fails is retried by the consumer's RetryPolicy and may
// become the next dead letter. The key is free when it has no messages. A message that arrives in that moment
// either is stored before and keeps the key stopped, or finds the key free: a foreign key from messages to
// keys guarantees that.
//
//   - The process ends before the transaction commits: the message is still there, and another process
//     continues.
//   - The process ends before the message is deleted: its entry is there, and no handler runs.
//   - The process stalls, and another one claims the key: later calls of the first process change nothing.
//   - The process ends between a stored dead letter and the acknowledgement: the message is redelivered, and
//     acknowledged because it is stored already. If the dead letter was removed meanwhile, its entry is there.
//   - Another process runs an earlier copy of the message: its entry makes the two wait for each other, and
//     one takes effect.
//
// The transaction of a kept message locks its key in the store: no other process runs the message meanwhile,
// however long it takes. If the process dies, another one continues with the key within about 15 s, plus
// HandlerTimeout if handlers have steps before their transactions. Kept messages run beside the messages of
// the queue, up to four keys at once in one process, in addition to ConsumerConfig.Concurrency. They do not
// count for ConsumerConfig.MessageLimit.
//
// If a process loses its queue while it gives up a message, it may park a key although the queue's next owner
// processes the message. No message is out of order by that. The key waits until the dead letter is replayed,
// which changes nothing, or removed.

const (
	// maxKey is the longest ordering key, in bytes, that is stored unchanged, because of the index.
	maxKey = 255

	// parkedCount is the interval at which the waiting messages are counted. In between, stored messages are
	// added.
	parkedCount = 10 * time.Second

	// fullPause is how long a message stays with the broker after it found MaxParked messages.
	fullPause = 5 * time.Second
)

var errFree = errors.New("inboxpgx: the ordering key is no longer stopped")

// parks stops ordering keys for the consumers of a Store: see inbox.ConsumerConfig.ParkKeys. The messages of
// a stopped key are in driver.Parking. Process stores them, and Background processes them in the end. The key
// of a message is read in the statement that makes its entry, so that a message of a free key costs no extra
// round trip.
type parks struct {
	place driver.Parking
	cfg   atomic.Pointer[inbox.ConsumerConfig] // of the consumer that stops keys; nil: none does
	not   atomic.Bool                          // a consumer of the Store does not stop keys
	wake  chan struct{}                        // capacity one: keys may continue
	poll  time.Duration                        // drainPoll
	lease time.Duration                        // drainLease

	known  sync.Map // keys that were stopped at the last check; emptied after each count
	counts atomic.Pointer[counts]
	stored atomic.Int64 // since the last count, copies included
}

// counts has the numbers of stopped keys and of their messages.
type counts struct {
	at             time.Time
	keys, messages int
}

func newParks(place driver.Parking) *parks {
	p := &parks{place: place, wake: make(chan struct{}, 1), poll: drainPoll, lease: drainLease}
	p.counts.Store(&counts{})
	return p
}

// Park implements driver.Parker of inbox. Keys are stopped for all consumers of this Store, with the settings
// of the consumer with ParkKeys that was created last.
func (s *Store) Park(cfg inbox.ConsumerConfig) {
	if cfg.ParkKeys {
		s.parks.cfg.Store(&cfg)
	} else {
		s.parks.not.Store(true)
	}
}

// Parked implements driver.Parker of inbox.
func (s *Store) Parked() inboxdriver.DeadLetters { return s.parks.place }

// Stop implements driver.Parker of inbox.
func (s *Store) Stop(ctx context.Context, dead inbox.DeadLetter) error {
	key := s.parks.keyOf(&dead.Message)
	if key == "" {
		return fmt.Errorf("inboxpgx: message %s has no ordering key to stop", dead.Message.ID)
	}
	err := s.parks.place.Stop(ctx, key, dead)
	if err == nil {
		s.parks.note(key)
	}
	return err
}

// park stores a message behind the dead letter of its key, and returns its result. The result is errFree if
// the key is no longer stopped.
func (s *Store) park(ctx context.Context, b *member) error {
	var waits bool
	full, err := s.parks.full(ctx)
	if err == nil {
		waits, err = s.parks.place.Wait(ctx, b.key, b.message(), full)
	}
	switch {
	case errors.Is(err, driver.ErrFull):
		err = inbox.Postpone(err, fullPause)
	case err != nil:
		err = inbox.Unavailable(err)
	case waits:
		s.parks.note(b.key)
	default:
		s.parks.known.Delete(b.key)
		return errFree
	}
	s.count.add(ctx, b.message().Name, parked, err)
	return err
}

// parkEarly stores a message before its Prepare step if its key is known to be stopped. It always stores a
// message that has no transaction, because nothing else would check the key.
func (s *Store) parkEarly(b *member) {
	if b.ended || b.key == "" {
		return
	}
	if _, known := s.parks.known.Load(b.key); !known && b.work.one != nil {
		return
	}
	if err := s.park(b.ctx, b); !errors.Is(err, errFree) {
		b.end(err)
	}
}

// keyOf returns the ordering key of a message as it is stored; empty if it has none, or if keys are not
// stopped.
func (p *parks) keyOf(m *inbox.Message) string {
	cfg := p.cfg.Load()
	if cfg == nil || m.Validate() != nil {
		return ""
	}
	key := m.Key
	if cfg.Key != nil {
		key = ""
		apart(func() {
			defer func() { _ = recover() }() // the consumer has logged it
			key = cfg.Key(m)
		})
	}
	if len(key) <= maxKey && base.IsText(key) {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// note records that a key is stopped and has one more message.
func (p *parks) note(key string) {
	p.known.Store(key, nil)
	p.stored.Add(1)
}

// full reports whether MaxParked messages wait.
func (p *parks) full(ctx context.Context) (bool, error) {
	most := p.cfg.Load().MaxParked
	if time.Since(p.counts.Load().at) >= parkedCount {
		if err := p.count(ctx, most); err != nil {
			return false, err
		}
	}
	return p.counts.Load().messages+int(p.stored.Load()) >= most, nil
}

func (p *parks) count(ctx context.Context, most int) error {
	keys, messages, err := p.place.Count(ctx, most)
	if err != nil {
		return err
	}
	p.known.Clear()
	p.stored.Store(0)
	p.counts.Store(&counts{time.Now(), keys, messages})
	return nil
}

// observe reports the latest counts until the returned function is called.
func (p *parks) observe(kit telemetry.Kit, consumer attribute.KeyValue) (stop func(), err error) {
	keys, err1 := kit.Meter.Int64ObservableGauge("holdfast.inbox.parked_keys",
		metric.WithDescription("Ordering keys that are stopped by their dead letters; counted about every 10 s"))
	messages, err2 := kit.Meter.Int64ObservableGauge("holdfast.inbox.parked_messages",
		metric.WithDescription("Messages that wait with their ordering keys, dead letters included, at most MaxParked; counted about every 10 s"))
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	registration, err := kit.Meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		latest := p.counts.Load()
		o.ObserveInt64(keys, int64(latest.keys), metric.WithAttributes(consumer))
		o.ObserveInt64(messages, int64(latest.messages), metric.WithAttributes(consumer))
		return nil
	}, keys, messages)
	if err != nil {
		return nil, err
	}
	return func() { _ = registration.Unregister() }, nil
}

// goOn starts a check for keys that may continue.
func (p *parks) goOn() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// slots bound how many messages of a name run at once, including messages of stopped keys.
type slots map[string]chan struct{}

func newSlots(byName map[string]HandlerConfig) slots {
	all := slots{}
	for name, cfg := range byName {
		if cfg.Concurrency > 0 {
			all[name] = make(chan struct{}, cfg.Concurrency)
		}
	}
	return all
}

// take waits for a slot of each name, in the order of the names, and returns a function that frees them.
func (s slots) take(ctx context.Context, msgs []*inbox.Message) (giveBack func()) {
	if len(s) == 0 {
		return func() {}
	}
	var names []string
	for _, m := range msgs {
		if s[m.Name] != nil {
			names = append(names, m.Name)
		}
	}
	slices.Sort(names)
	var taken []chan struct{}
	for _, name := range slices.Compact(names) {
		select {
		case s[name] <- struct{}{}:
			taken = append(taken, s[name])
		case <-ctx.Done(): // the message then fails with ctx's error
		}
	}
	return func() {
		for _, slot := range taken {
			<-slot
		}
	}
}
