package outboxpgx

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// refusals are the outcomes that the table has refused, or ignored. Their messages are still ready in the table. This Store
// does not return them from a claim: they are not published again. It tries to record the outcome again with later
// settlements of the lane. A message that failed also holds back the later ones of its key, which a published one does not.
//
// There are few: such messages are the first ones of their lane, and a claim reads no more of a lane than it returns.
type refusals struct {
	mu      sync.Mutex
	byID    map[uuid.UUID]*refusal
	looked  time.Time // for messages that are gone meanwhile
	empties int       // claims in a row that found nothing else
}

type refusal struct {
	outcome driver.Settlement
	lane    int
	reason  error
	tried   time.Time
}

const (
	// refusedDelay is when to ask again for rows that could not be released, or whose outcomes were refused.
	refusedDelay = time.Second
	// retryRefused is the time between two tries to record an outcome that was refused.
	retryRefused = 5 * time.Second
)

// of returns the outcome of a message that the table has refused.
func (r *refusals) of(id uuid.UUID) (driver.Settlement, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.byID[id]; known != nil {
		return known.outcome, true
	}
	return driver.Settlement{}, false
}

// again returns the outcomes of the leased lanes that are to be tried again.
func (r *refusals) again(leases []driver.Lease) (outcomes []driver.Settlement) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.byID) == 0 {
		return nil
	}
	leased := map[int]bool{}
	for _, l := range leases {
		leased[l.Lane] = true
	}
	for _, known := range r.byID {
		if leased[known.lane] && time.Since(known.tried) >= retryRefused {
			outcomes = append(outcomes, known.outcome)
		}
	}
	return outcomes
}

// note takes what came of outcomes: those in failures were refused.
func (r *refusals) note(b driver.Batch, outcomes []driver.Settlement, failures map[uuid.UUID]error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.byID) == 0 && len(failures) == 0 {
		return
	}
	lanes := map[uuid.UUID]int{}
	for _, m := range b.Messages {
		lanes[m.ID] = driver.LaneOf(m)
	}
	for _, o := range outcomes {
		reason := failures[o.ID]
		known := r.byID[o.ID]
		switch {
		case reason == nil && known != nil:
			r.looked = time.Time{} // it is recorded, or the lease was not held any more
		case reason == nil:
		case known != nil:
			known.reason, known.tried = reason, time.Now()
		default:
			if r.byID == nil {
				r.byID = map[uuid.UUID]*refusal{}
			}
			r.byID[o.ID] = &refusal{outcome: o, lane: lanes[o.ID], reason: reason, tried: time.Now()}
		}
	}
}

// err names one of the messages, nil if there is none.
func (r *refusals) err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, known := range r.byID {
		return fmt.Errorf("outboxpgx: outcomes of %d messages cannot be recorded; message %s: %w", len(r.byID), id, known.reason)
	}
	return nil
}

// rest reports whether to wait before the next claim. A claim returns a few lanes of many, so it takes several claims to
// find out that nothing else is ready.
func (r *refusals) rest(found bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if found {
		r.empties = 0
		return false
	}
	r.empties++
	return r.empties > driver.Lanes/defaultLanesPerClaim
}

// ids returns the messages when it is time to look whether they are gone: another relay has settled them, or somebody has
// removed them.
func (r *refusals) ids() (ids uuids) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.byID) == 0 || time.Since(r.looked) < retryRefused {
		return nil
	}
	r.looked = time.Now()
	for id := range r.byID {
		ids = append(ids, pgtype.UUID{Bytes: id, Valid: true})
	}
	return ids
}

// keep forgets all but these of the messages asked for.
func (r *refusals) keep(asked uuids, there map[uuid.UUID]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range asked {
		if !there[id.Bytes] {
			delete(r.byID, id.Bytes)
		}
	}
}

// forgetGone forgets refused outcomes of messages that are not ready any more.
func (s *Store) forgetGone(ctx context.Context) error {
	ids := s.refusals.ids()
	if len(ids) == 0 {
		return nil
	}
	there := map[uuid.UUID]bool{}
	err := s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		rows, _ := conn.Query(ctx, s.sql.stillReady, ids) // ForEachRow returns its error
		var id [16]byte
		_, err := pgx.ForEachRow(rows, []any{&id}, func() error {
			there[id] = true
			return nil
		})
		return err
	})
	if err == nil {
		s.refusals.keep(ids, there)
	}
	return err
}
