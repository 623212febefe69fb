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

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Parking is a driver.Parking in memory. It is safe for concurrent use.
type Parking struct {
	mu     sync.Mutex
	parked []*parked // in the order in which they came
}

// parked is one message that waits. With a class it is a dead letter.
type parked struct {
	key string
	inbox.DeadLetter
	owner uuid.UUID
	until time.Time // of the owner's lease; zero: there is none
}

// free reports whether anybody may claim it.
func (p *parked) free() bool { return !time.Now().Before(p.until) }

// NewParking returns a Parking without messages.
func NewParking() *Parking { return &Parking{} }

// Stop implements driver.Parking.
func (p *Parking) Stop(ctx context.Context, key string, dead inbox.DeadLetter) error {
	return p.put(ctx, key, dead)
}

// Append implements driver.Parking.
func (p *Parking) Append(ctx context.Context, key string, m *inbox.Message) error {
	return p.put(ctx, key, inbox.DeadLetter{Message: *m})
}

func (p *Parking) put(ctx context.Context, key string, dead inbox.DeadLetter) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	dead.Message = copyOf(dead.Message)
	known := p.find(dead.Message.ID)
	switch {
	case known == nil:
		p.parked = append(p.parked, &parked{key: key, DeadLetter: dead})
	case dead.Class != "" && known.Class == "" && known.Message.Replays <= dead.Message.Replays && known.free():
		*known = parked{key: known.key, DeadLetter: dead}
	}
	return nil
}

// find returns what is kept of an id, nil for nothing. The lock is held.
func (p *Parking) find(id uuid.UUID) *parked {
	for _, one := range p.parked {
		if one.Message.ID == id {
			return one
		}
	}
	return nil
}

// has reports whether a message waits.
func (p *Parking) has(id uuid.UUID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.find(id) != nil
}

// Heads implements driver.Parking.
func (p *Parking) Heads(ctx context.Context, after string, most int) ([]driver.Head, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	stopped := map[string]bool{}
	for _, one := range p.parked {
		if _, known := stopped[one.key]; !known && one.key > after {
			stopped[one.key] = one.Class != ""
		}
	}
	keys := slices.Sorted(maps.Keys(stopped))
	heads := make([]driver.Head, 0, len(keys))
	for _, key := range keys[:min(len(keys), most)] {
		heads = append(heads, driver.Head{Key: key, Stopped: stopped[key]})
	}
	return heads, ctx.Err()
}

// Depths implements driver.Letters.
func (p *Parking) Depths(ctx context.Context) ([]driver.Depth, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	byClass := map[string]driver.Depth{}
	for _, one := range p.parked {
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

// Scan implements driver.Letters.
func (p *Parking) Scan(
	ctx context.Context, class string, visit func(*inbox.DeadLetter) (driver.Fate, error), _ func(inbox.DeadLetter, error),
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
	for _, one := range p.parked {
		if class != "" && one.Class == class {
			dead := one.DeadLetter
			dead.Message = copyOf(dead.Message)
			all = append(all, dead)
		}
	}
	return all
}

// end does to a letter what the fate says, unless somebody else was faster.
func (p *Parking) end(dead inbox.DeadLetter, fate driver.Fate) {
	p.mu.Lock()
	defer p.mu.Unlock()
	one := p.find(dead.Message.ID)
	if one == nil || one.Class == "" || !one.FailedAt.Equal(dead.FailedAt) {
		return
	}
	switch fate {
	case driver.Drop:
		p.parked = slices.DeleteFunc(p.parked, func(other *parked) bool { return other == one })
	case driver.Return:
		m := one.Message
		m.Body = dead.Message.Body
		m.Attempt, m.Recovered, m.FirstFailedAt, m.History = 1, 0, time.Time{}, nil
		m.Replays++
		*one = parked{key: one.key, DeadLetter: inbox.DeadLetter{Message: m}}
	}
}

func copyOf(m inbox.Message) inbox.Message {
	m.Body, m.Headers, m.History = bytes.Clone(m.Body), maps.Clone(m.Headers), slices.Clone(m.History)
	return m
}
