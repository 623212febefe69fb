// Package outboxtest is an outbox in memory, for unit tests and for demonstrations without a server. [Store] is
// writer, source and dead letters in one, on the transactions of txretrytest. [Publisher] records messages and fails
// by script.
//
// Both keep the guarantees of the real ones and pass the same suite, outboxtest/conformance. All waiting uses package
// time, so tests may run in a testing/synctest bubble.
package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/internal/actor"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Store is an outbox in memory. Its methods are safe for concurrent use.
type Store struct {
	mu        sync.Mutex
	entries   []*entry // not published and not dead, in stored order
	byID      map[uuid.UUID]*entry
	published []driver.Message
	dead      []dead
	lanes     [driver.Lanes]lane
	once      map[string]remembered
	seq       int // of the last entry
	died      int // of the last dead letter
	pause     driver.Pause

	relays relays
}

// keep is the maximum number of published messages in memory.
const keep = 10_000

type entry struct {
	driver.Message
	seq       int
	committed bool
	due       time.Time // zero: ready
	class     driver.Class
	err       string // of the last attempt
}

type lane struct {
	token int64
	until time.Time // end of the lease; zero: the lane is free

	batch   int       // the maximum number of messages of the last claim
	suspect int       // the seq up to which messages are suspect; 0: none are
	alone   uuid.UUID // the last message that was claimed alone
	losses  int       // the number of such claims lost in a row
}

// New returns an empty Store.
func New() *Store { return &Store{byID: map[uuid.UUID]*entry{}, once: map[string]remembered{}} }

// Write stores messages as part of a transaction of txretrytest.Manager. After the commit, relays can claim them and
// one is woken. After a rollback, nothing is stored. If outbox.Prepare rejects a message, Write returns the error and
// stores nothing. Other errors occur at COMMIT, like with the real writer: the unique violation of Postgres for an id
// that is stored already, and the error of a transaction that is read-only or has failed.
func (s *Store) Write(ctx context.Context, tx pgx.Tx, msgs ...outbox.Message) error {
	if tx == nil {
		return errors.New("outboxtest: Write needs a transaction")
	}
	if len(msgs) == 0 {
		return nil
	}
	prepared, err := outbox.Prepare(ctx, msgs, 0)
	if err != nil {
		return err
	}
	return s.store(tx, prepared)
}

func (s *Store) store(tx pgx.Tx, prepared []driver.Message) error {
	added := make([]*entry, len(prepared))
	for i, m := range prepared {
		added[i] = &entry{Message: clone(m)}
	}
	err := txretrytest.EffectAtCommit(tx, func() error { return s.add(added) }, func() { s.remove(added) }, func() { s.commit(added) })
	if err != nil {
		return fmt.Errorf("outboxtest: write: %w", err)
	}
	txdriver.Hint(tx, s.Wake)
	return nil
}

func (s *Store) add(added []*entry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range added {
		if s.byID[e.ID] != nil {
			return &pgconn.PgError{Severity: "ERROR", Code: "23505", Message: "duplicate message id " + e.ID.String()}
		}
	}
	now := time.Now()
	for _, e := range added {
		e.CreatedAt = now
		if e.NotBefore.After(now) {
			e.due = e.NotBefore
		}
		e.NotBefore = time.Time{}
		s.append(e)
	}
	return nil
}

// append adds an entry after all others. The caller holds the lock.
func (s *Store) append(e *entry) {
	s.seq++
	e.seq = s.seq
	s.byID[e.ID] = e
	s.entries = append(s.entries, e)
}

func (s *Store) remove(gone []*entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range gone {
		delete(s.byID, e.ID)
	}
	s.sweep()
}

// sweep drops the entries that are no longer in byID. The caller holds the lock.
func (s *Store) sweep() {
	s.entries = slices.DeleteFunc(s.entries, func(e *entry) bool { return s.byID[e.ID] != e })
}

func (s *Store) commit(added []*entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range added {
		e.committed = true
	}
}

// Pending returns the committed, unpublished messages in stored order, without dead letters.
func (s *Store) Pending() []driver.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []driver.Message
	for _, e := range s.entries {
		if e.committed {
			list = append(list, clone(e.Message))
		}
	}
	return list
}

// Published returns the last 10,000 messages that relays settled as published, in that order.
func (s *Store) Published() []driver.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.published)
}

// dedupRetention is the default of outboxpgx.
const dedupRetention = 24 * time.Hour

// remembered is a stored key of WriteOnce.
type remembered struct {
	id      uuid.UUID
	expires time.Time
}

// WriteOnce is like Write for one message. If a message was written with the key within 24 h, it writes nothing and
// returns the id of that message and false.
func (s *Store) WriteOnce(ctx context.Context, tx pgx.Tx, key string, m outbox.Message) (id uuid.UUID, first bool, err error) {
	if tx == nil {
		return uuid.Nil, false, errors.New("outboxtest: WriteOnce needs a transaction")
	}
	prepared, err := outbox.Prepare(ctx, []outbox.Message{m}, 0)
	if refused := driver.CheckDedupKey(key); refused != nil {
		err = errors.Join(&outbox.MessageError{Field: "DedupKey", Problem: refused.Error()}, err)
	}
	if err != nil {
		return uuid.Nil, false, err
	}
	now := time.Now()
	s.mu.Lock()
	old, known := s.once[key]
	s.mu.Unlock()
	id, first = prepared[0].ID, !known || !now.Before(old.expires)
	remember, forget := func() {}, func() {}
	if first {
		remember = func() { s.setOnce(key, remembered{id, now.Add(dedupRetention)}) }
		forget = func() { s.setOnce(key, old) }
	}
	if err := txretrytest.Effect(tx, remember, forget); err != nil {
		return uuid.Nil, false, fmt.Errorf("outboxtest: write once: %w", err)
	}
	if !first {
		return old.id, false, nil
	}
	return id, true, s.store(tx, prepared)
}

// setOnce stores the entry of a key. A zero remembered deletes the key.
func (s *Store) setOnce(key string, r remembered) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.once[key] = r; r.id == uuid.Nil {
		delete(s.once, key)
	}
}

// Pause implements driver.Pausable.
func (s *Store) Pause(_ context.Context, by, reason string) error {
	if err := actor.Check("by", "reason", by, reason); err != nil {
		return fmt.Errorf("outboxtest: pause: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pause.By, s.pause.Reason = by, reason
	if s.pause.Since.IsZero() {
		s.pause.Since = time.Now()
	}
	return nil
}

// Resume implements driver.Pausable. It wakes a relay.
func (s *Store) Resume(context.Context) error {
	s.mu.Lock()
	s.pause = driver.Pause{}
	s.mu.Unlock()
	s.Wake()
	return nil
}

// Paused implements driver.Pausable.
func (s *Store) Paused(context.Context) (driver.Pause, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pause, nil
}

// Depth implements driver.Measured.
func (s *Store) Depth(ctx context.Context) (driver.Depth, error) {
	if err := ctx.Err(); err != nil {
		return driver.Depth{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	stats := driver.Depth{Dead: len(s.dead), Stored: int64(s.seq)}
	for i := range s.lanes {
		l := &s.lanes[i]
		leased := now.Before(l.until)
		if leased {
			stats.Leased++
		}
		if l.suspect > 0 || l.lost() && !leased {
			stats.Doubtful++
		}
	}
	for _, e := range s.entries {
		if !e.committed {
			continue
		}
		if e.due.IsZero() {
			stats.Ready++
		} else {
			stats.Parked++
		}
		if e.due.IsZero() || e.Attempts > 0 {
			stats.OldestAge = max(stats.OldestAge, now.Sub(e.CreatedAt))
		}
	}
	for _, n := range []*int{&stats.Ready, &stats.Parked, &stats.Dead} {
		*n = min(*n, driver.StatsLimit)
	}
	return stats, nil
}
