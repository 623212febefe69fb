package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// dedupRetention is the default of outboxpgx.
const dedupRetention = 24 * time.Hour

// remembered is a key that was written with.
type remembered struct {
	id      uuid.UUID
	expires time.Time
}

// WriteOnce is Write for one message, unless a message was written with the key within 24 h: then it
// writes nothing and returns that message's id and false.
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

// setOnce takes a zero remembered as none.
func (s *Store) setOnce(key string, r remembered) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.once[key] = r; r.id == uuid.Nil {
		delete(s.once, key)
	}
}
