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

// keep bounds the published messages that are remembered.
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
	until time.Time // of the lease; zero: nobody holds the lane

	batch   int       // the most messages of the last claim
	suspect int       // the seq up to which messages are under suspicion; 0: none are
	alone   uuid.UUID // the last message that was claimed alone
	losses  int       // how many such claims were lost in a row
}

// New returns an empty Store.
func New() *Store { return &Store{byID: map[uuid.UUID]*entry{}, once: map[string]remembered{}} }

// Write stores messages as part of a transaction of txretrytest.Manager: a
// relay sees them once it has committed, and is woken up then; never if it rolls back. What
// outbox.Prepare refuses is refused with nothing stored. The rest is refused
// where the real writer's statement is, at COMMIT: an id that is stored already,
// with the unique violation that Postgres gives, and a transaction that only
// reads or has failed.
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

// append adds an entry behind all others. The caller holds the lock.
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

// sweep drops the entries that byID has forgotten. The caller holds the lock.
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

// Pending returns the committed messages that are not published yet, in stored
// order. Dead letters are not among them.
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

// Published returns the messages that a relay has settled as published, in
// that order; the last 10,000 of them.
func (s *Store) Published() []driver.Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.published)
}
