// Package memory has the stores of inboxtest in memory.
package memory

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	pgxdriver "github.com/holdfast-go/holdfast/inbox/inboxpgx/driver"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// Entries is a driver.Entries of inboxpgx for transactions of one manager of txretrytest. Each new entry
// removes entries older than the retention, unless they are parked. It is safe for concurrent use.
type Entries struct {
	retention time.Duration

	mu       sync.Mutex
	ledgers  map[string]*Ledger
	parkings map[string]*Parking
	since    map[entry]time.Time
	order    []entry // oldest first
}

// countLimit is the maximum of Processed.
const countLimit = 100_000

type entry struct {
	consumer string
	id       uuid.UUID
}

// NewEntries returns an Entries without entries.
func NewEntries(retention time.Duration) *Entries {
	return &Entries{retention: retention, ledgers: map[string]*Ledger{}, parkings: map[string]*Parking{}, since: map[entry]time.Time{}}
}

// Record implements driver.Entries. It returns an error if tx is not an open transaction of txretrytest.
func (e *Entries) Record(_ context.Context, tx pgx.Tx, consumer string, id uuid.UUID, key string) (first bool, err error) {
	of, place := entry{consumer, id}, e.parking(consumer)
	err = txretrytest.Effect(tx, func() { first = (key == "" || !place.stopped(key)) && e.insert(of) }, func() {
		if first {
			e.remove(of)
		}
	})
	return first, err
}

// RecordAll implements driver.Entries.
func (e *Entries) RecordAll(ctx context.Context, tx pgx.Tx, consumer string, msgs []*inbox.Message, keys []string) (first []bool, err error) {
	first = make([]bool, len(msgs))
	for i, m := range msgs {
		key := ""
		if keys != nil {
			key = keys[i]
		}
		if first[i], err = e.Record(ctx, tx, consumer, m.ID, key); err != nil {
			return nil, err
		}
	}
	return first, nil
}

// Recorded implements driver.Entries.
func (e *Entries) Recorded(_ context.Context, consumer string, ids []uuid.UUID) ([]bool, error) {
	recorded := make([]bool, len(ids))
	for i, id := range ids {
		recorded[i] = e.Seen(consumer, id)
	}
	return recorded, nil
}

// Forget implements driver.Entries.
func (e *Entries) Forget(_ context.Context, tx pgx.Tx, consumer string, ids []uuid.UUID) error {
	for _, id := range ids {
		key := entry{consumer, id}
		if err := txretrytest.Effect(tx, func() { e.remove(key) }, func() { e.insert(key) }); err != nil {
			return err
		}
	}
	return nil
}

// Processed implements driver.Entries.
func (e *Entries) Processed(_ context.Context, consumer string, d time.Duration) (n int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	since := time.Now().Add(-d)
	for key, at := range e.since {
		if key.consumer == consumer && at.After(since) {
			n++
		}
	}
	return min(n, countLimit), nil
}

// Look implements driver.Entries.
func (e *Entries) Look(_ context.Context, consumer string, id uuid.UUID) (pgxdriver.Known, error) {
	known := e.parking(consumer).known(id)
	e.mu.Lock()
	defer e.mu.Unlock()
	known.ProcessedAt = e.since[entry{consumer, id}]
	return known, nil
}

// Ledger implements driver.Entries.
func (e *Entries) Ledger(consumer string) driver.Ledger {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ledgers[consumer] == nil {
		e.ledgers[consumer] = NewLedger()
	}
	return e.ledgers[consumer]
}

// Parking implements driver.Entries.
func (e *Entries) Parking(consumer string) pgxdriver.Parking { return e.parking(consumer) }

func (e *Entries) parking(consumer string) *Parking {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.parkings[consumer] == nil {
		e.parkings[consumer] = newParking(e, consumer)
	}
	return e.parkings[consumer]
}

// Seen reports whether the consumer has recorded the id.
func (e *Entries) Seen(consumer string, id uuid.UUID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, known := e.since[entry{consumer, id}]
	return known
}

func (e *Entries) insert(key entry) (first bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	e.prune(now)
	return e.add(key, now)
}

// add adds an entry unless it is there. The lock is held.
func (e *Entries) add(key entry, now time.Time) (first bool) {
	if _, known := e.since[key]; known {
		return false
	}
	e.since[key] = now
	e.order = append(e.order, key)
	return true
}

// prune drops entries that are older than the retention and not parked. The lock is held.
func (e *Entries) prune(now time.Time) {
	n := 0
	var kept []entry
	for ; n < len(e.order); n++ {
		key := e.order[n]
		since, known := e.since[key]
		if known && now.Sub(since) <= e.retention {
			break
		}
		if place := e.parkings[key.consumer]; known && place != nil && place.has(key.id) {
			kept = append(kept, key)
			continue
		}
		delete(e.since, key)
	}
	n -= copy(e.order[n-len(kept):], kept)
	e.order = e.order[n:]
}

func (e *Entries) remove(key entry) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.since, key)
}

// Parking is a driver.Parking of inboxpgx in memory. It is safe for concurrent use.
type Parking struct {
	entries  *Entries
	consumer string

	mu      sync.Mutex
	keys    map[string]*stopped
	waiting []*waiting // in order of arrival
	claims  time.Duration
}

// stopped is a stopped key.
type stopped struct {
	nextAt time.Time
	taken  bool // a transaction runs its first message
}

// waiting is one message of a stopped key. With a class it is a dead letter.
type waiting struct {
	key   string
	since time.Time
	inbox.DeadLetter
	runs int
}

// never is later than every time that a test reaches.
var never = time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)

func newParking(e *Entries, consumer string) *Parking {
	return &Parking{entries: e, consumer: consumer, keys: map[string]*stopped{}}
}

func (p *Parking) stopped(key string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.keys[key] != nil
}

// Stop implements driver.Parking.
func (p *Parking) Stop(ctx context.Context, key string, dead inbox.DeadLetter) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	recorded := p.entries.Seen(p.consumer, dead.Message.ID)
	p.mu.Lock()
	defer p.mu.Unlock()
	if recorded || p.find(dead.Message.ID) != nil {
		return nil
	}
	dead.Message = copyOf(dead.Message)
	if p.keys[key] != nil {
		dead = inbox.DeadLetter{Message: dead.Message}
	} else {
		p.keys[key] = &stopped{nextAt: never}
	}
	p.waiting = append(p.waiting, &waiting{key: key, since: time.Now(), DeadLetter: dead})
	return nil
}

// Wait implements driver.Parking.
func (p *Parking) Wait(ctx context.Context, key string, m *inbox.Message, full bool) (waits bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.find(m.ID) != nil:
		return true, nil
	case p.keys[key] == nil:
		return false, nil
	case full:
		return false, pgxdriver.ErrFull
	}
	p.waiting = append(p.waiting, &waiting{key: key, since: time.Now(), DeadLetter: inbox.DeadLetter{Message: copyOf(*m)}})
	return true, nil
}

// find returns the kept message with an id, or nil. The lock is held.
func (p *Parking) find(id uuid.UUID) *waiting {
	for _, one := range p.waiting {
		if one.Message.ID == id {
			return one
		}
	}
	return nil
}

// first returns the first message of a key, nil for none. The lock is held.
func (p *Parking) first(key string) *waiting {
	at := slices.IndexFunc(p.waiting, func(one *waiting) bool { return one.key == key })
	if at < 0 {
		return nil
	}
	return p.waiting[at]
}

// has reports whether a message waits.
func (p *Parking) has(id uuid.UUID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.find(id) != nil
}

// known returns when a message was kept, and the dead letter that stopped its key; zero: it does not wait.
func (p *Parking) known(id uuid.UUID) (k pgxdriver.Known) {
	p.mu.Lock()
	defer p.mu.Unlock()
	one := p.find(id)
	if one == nil {
		return k
	}
	k.ParkedAt = one.since
	if first := p.first(one.key); first.Class != "" {
		k.StoppedBy = first.Message.ID
	}
	return k
}

// Claim implements driver.Parking.
func (p *Parking) Claim(ctx context.Context, lease time.Duration) (*pgxdriver.Head, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now, earliest := time.Now(), ""
	for _, key := range slices.Sorted(maps.Keys(p.keys)) {
		k := p.keys[key]
		if !k.taken && !k.nextAt.After(now) && (earliest == "" || k.nextAt.Before(p.keys[earliest].nextAt)) {
			earliest = key
		}
	}
	if earliest == "" {
		return nil, nil
	}
	return p.claim(earliest, lease), nil
}

// Next implements driver.Parking.
func (p *Parking) Next(ctx context.Context, h *pgxdriver.Head, lease time.Duration) (next *pgxdriver.Head, err error) {
	err = p.change(ctx, h, func(one *waiting, _ *stopped) {
		p.remove(one)
		next = p.claim(h.Key, lease)
	})
	return next, err
}

func (p *Parking) claim(key string, lease time.Duration) *pgxdriver.Head {
	p.claims++
	until := time.Now().Add(lease - p.claims) // no two claims have the same end
	p.keys[key].nextAt = until
	h := &pgxdriver.Head{Key: key, Until: until}
	if one := p.first(key); one != nil {
		m := copyOf(one.Message)
		h.Message, h.Runs = &m, one.runs
		one.runs++
	}
	return h
}

// of returns the key of a head and its first message; nil if the claim has ended or a transaction runs it. The lock is held.
func (p *Parking) of(h *pgxdriver.Head) (*stopped, *waiting) {
	k := p.keys[h.Key]
	if k == nil || k.taken || !k.nextAt.Equal(h.Until) {
		return nil, nil
	}
	return k, p.first(h.Key)
}

// Take implements driver.Parking. The message is here until Next removes it.
func (p *Parking) Take(_ context.Context, tx pgx.Tx, h *pgxdriver.Head) (first bool, err error) {
	of, took := entry{p.consumer, h.Message.ID}, false
	end := func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if took {
			p.keys[h.Key].taken = false
		}
		took = false
	}
	err = txretrytest.Effect(tx, func() {
		p.mu.Lock()
		k, _ := p.of(h)
		p.mu.Unlock()
		if first = k != nil && p.entries.insert(of); !first {
			return
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		k.taken, took = true, true
	}, func() {
		if first {
			p.entries.remove(of)
		}
		end()
	})
	if err == nil && first {
		err = txretrytest.EffectAtCommit(tx, func() error { return nil }, nil, end)
	}
	return first, err
}

// Retry implements driver.Parking.
func (p *Parking) Retry(ctx context.Context, h *pgxdriver.Head, next *inbox.Message, delay time.Duration) error {
	return p.change(ctx, h, func(one *waiting, k *stopped) {
		one.Message, one.runs, k.nextAt = copyOf(*next), 0, time.Now().Add(delay)
	})
}

// Fail implements driver.Parking.
func (p *Parking) Fail(ctx context.Context, h *pgxdriver.Head, dead inbox.DeadLetter) error {
	return p.change(ctx, h, func(one *waiting, k *stopped) {
		dead.Message = copyOf(dead.Message)
		one.DeadLetter, one.runs, k.nextAt = dead, 0, never
	})
}

func (p *Parking) change(ctx context.Context, h *pgxdriver.Head, with func(*waiting, *stopped)) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if k, one := p.of(h); k != nil {
		with(one, k)
	}
	return nil
}

// Release implements driver.Parking.
func (p *Parking) Release(ctx context.Context, h *pgxdriver.Head) error {
	return p.change(ctx, h, func(one *waiting, k *stopped) {
		k.nextAt = time.Now()
		switch {
		case one == nil:
			delete(p.keys, h.Key)
		case h.Runs > 0:
			k.nextAt = time.Time{}
			fallthrough
		case h.Message != nil:
			one.runs = h.Runs
		}
	})
}

// Count implements driver.Parking.
func (p *Parking) Count(ctx context.Context, most int) (keys, messages int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return min(len(p.keys), most), min(len(p.waiting), most), ctx.Err()
}

// Depths implements driver.DeadLetters.
func (p *Parking) Depths(ctx context.Context) ([]driver.Depth, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	byClass := map[string]driver.Depth{}
	for _, one := range p.waiting {
		if one.Class == "" {
			continue
		}
		d := byClass[one.Class]
		if d.Messages == 0 || one.FailedAt.Before(d.Oldest) {
			d.Oldest = one.FailedAt
		}
		byClass[one.Class] = driver.Depth{Class: one.Class, Messages: d.Messages + 1, Oldest: d.Oldest}
	}
	return slices.SortedFunc(maps.Values(byClass), func(a, b driver.Depth) int { return cmp.Compare(a.Class, b.Class) }), ctx.Err()
}

// Scan implements driver.DeadLetters.
func (p *Parking) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), failed func(inbox.DeadLetter, error),
) error {
	for _, dead := range p.dead(class) {
		outcome, err := visit(&dead)
		if errors.Is(err, driver.ErrDone) {
			return nil
		}
		if err := errors.Join(err, ctx.Err()); err != nil {
			return err
		}
		if err := p.end(dead, outcome); err != nil {
			failed(dead, err)
		}
	}
	return nil
}

func (p *Parking) dead(class string) (all []inbox.DeadLetter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.waiting {
		if class != "" && one.Class == class {
			dead := one.DeadLetter
			dead.Message = copyOf(dead.Message)
			all = append(all, dead)
		}
	}
	return all
}

// end applies an outcome to a dead letter. It returns ErrGone if another call was faster.
func (p *Parking) end(dead inbox.DeadLetter, outcome driver.Outcome) error {
	if outcome == driver.Keep {
		return nil
	}
	p.entries.mu.Lock() // before the other lock, as in prune
	defer p.entries.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	one := p.find(dead.Message.ID)
	if one == nil || one.Class == "" || !one.FailedAt.Equal(dead.FailedAt) {
		return driver.ErrGone
	}
	switch outcome {
	case driver.Drop:
		p.remove(one)
		p.entries.add(entry{p.consumer, one.Message.ID}, time.Now())
	case driver.Return:
		m := one.Message
		m.Body = dead.Message.Body
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = 1, 0, time.Time{}, nil
		m.Replays++
		*one = waiting{key: one.key, since: one.since, DeadLetter: inbox.DeadLetter{Message: m}}
	}
	p.keys[one.key].nextAt = time.Now()
	return nil
}

func (p *Parking) remove(one *waiting) {
	p.waiting = slices.DeleteFunc(p.waiting, func(other *waiting) bool { return other == one })
}

func copyOf(m inbox.Message) inbox.Message {
	m.Body, m.Headers, m.History = bytes.Clone(m.Body), maps.Clone(m.Headers), slices.Clone(m.History)
	return m
}

// Ledger is a driver.Ledger in memory. It is safe for concurrent use.
type Ledger struct {
	mu      sync.Mutex
	entries map[uuid.UUID]ledgerEntry
}

// ledgerEntry is a driver.LedgerEntry with the time at which its copy is due.
type ledgerEntry struct {
	driver.LedgerEntry
	due time.Time
}

// NewLedger returns a Ledger without entries.
func NewLedger() *Ledger { return &Ledger{entries: map[uuid.UUID]ledgerEntry{}} }

// Look implements driver.Ledger.
func (l *Ledger) Look(ctx context.Context, id uuid.UUID) (driver.LedgerEntry, error) {
	if err := ctx.Err(); err != nil {
		return driver.LedgerEntry{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[id]
	if !e.due.IsZero() {
		e.Overdue = max(time.Since(e.due), 0)
	}
	return e.LedgerEntry, nil
}

// Start implements driver.Ledger.
func (l *Ledger) Start(ctx context.Context, m *inbox.Message) error {
	return l.change(ctx, m.ID, func(e ledgerEntry) ledgerEntry {
		e = newest(e, m, 0, 0)
		e.Open++
		return e
	})
}

// End implements driver.Ledger.
func (l *Ledger) End(ctx context.Context, m *inbox.Message) error {
	return l.change(ctx, m.ID, func(e ledgerEntry) ledgerEntry {
		e.Open = 0
		return e
	})
}

// Pass implements driver.Ledger.
func (l *Ledger) Pass(ctx context.Context, m *inbox.Message, after time.Duration) error {
	return l.change(ctx, m.ID, func(e ledgerEntry) ledgerEntry {
		e = newest(e, m, 1, after)
		e.Open = 0
		return e
	})
}

// newest returns the entry updated with the message, on attempts later and due after a time.
func newest(e ledgerEntry, m *inbox.Message, on int, after time.Duration) ledgerEntry {
	attempt, due := max(m.Attempt, 1)+on, time.Now().Add(after)
	switch {
	case m.Replays > e.Replays:
		return ledgerEntry{driver.LedgerEntry{Replays: m.Replays, Attempt: attempt}, due}
	case m.Replays == e.Replays && attempt >= e.Attempt:
		e.Attempt, e.due = attempt, due
	}
	return e
}

// Forget implements driver.Ledger.
func (l *Ledger) Forget(ctx context.Context, id uuid.UUID) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.entries, id)
	return nil
}

func (l *Ledger) change(ctx context.Context, id uuid.UUID, with func(ledgerEntry) ledgerEntry) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries[id] = with(l.entries[id])
	return nil
}
