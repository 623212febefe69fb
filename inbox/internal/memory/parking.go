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

// Parking is a driver.Parking of inboxpgx in memory. It is safe for concurrent use.
type Parking struct {
	entries  *Entries
	consumer string

	mu      sync.Mutex
	keys    map[string]*stopped
	waiting []*waiting // in the order in which they came
	claims  time.Duration
}

// stopped is a stopped key.
type stopped struct {
	nextAt time.Time
	taken  bool // a transaction runs its first message
}

// waiting is one message of a stopped key. With a class it is a dead letter.
type waiting struct {
	key string
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
	p.waiting = append(p.waiting, &waiting{key: key, DeadLetter: dead})
	return nil
}

// Wait implements driver.Parking.
func (p *Parking) Wait(ctx context.Context, key string, m *inbox.Message) (waits bool, err error) {
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
	}
	p.waiting = append(p.waiting, &waiting{key: key, DeadLetter: inbox.DeadLetter{Message: copyOf(*m)}})
	return true, nil
}

// find returns what is kept of an id, nil for nothing. The lock is held.
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
	until := time.Now().Add(lease - p.claims) // two claims never have the same end
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
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Outcome, error), _ func(inbox.DeadLetter, error),
) error {
	for _, dead := range p.letters(class) {
		fate, err := visit(&dead)
		if errors.Is(err, driver.ErrDone) {
			return nil
		}
		if err := errors.Join(err, ctx.Err()); err != nil {
			return err
		}
		p.end(dead, fate)
	}
	return nil
}

func (p *Parking) letters(class string) (all []inbox.DeadLetter) {
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

// end does to a letter what the fate says, unless somebody else was faster.
func (p *Parking) end(dead inbox.DeadLetter, fate driver.Outcome) {
	p.mu.Lock()
	defer p.mu.Unlock()
	one := p.find(dead.Message.ID)
	if one == nil || one.Class == "" || !one.FailedAt.Equal(dead.FailedAt) {
		return
	}
	switch fate {
	case driver.Drop:
		p.remove(one)
	case driver.Return:
		m := one.Message
		m.Body = dead.Message.Body
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = 1, 0, time.Time{}, nil
		m.Replays++
		*one = waiting{key: one.key, DeadLetter: inbox.DeadLetter{Message: m}}
	default:
		return
	}
	p.keys[one.key].nextAt = time.Now()
}

func (p *Parking) remove(one *waiting) {
	p.waiting = slices.DeleteFunc(p.waiting, func(other *waiting) bool { return other == one })
}

func copyOf(m inbox.Message) inbox.Message {
	m.Body, m.Headers, m.History = bytes.Clone(m.Body), maps.Clone(m.Headers), slices.Clone(m.History)
	return m
}
