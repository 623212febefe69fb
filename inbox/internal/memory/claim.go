package memory

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
)

// Claim implements driver.Parking.
func (p *Parking) Claim(ctx context.Context, key string, l driver.Lease) (*inbox.Message, bool, error) {
	if err := ctx.Err(); err != nil {
		return nil, false, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	at := slices.IndexFunc(p.parked, func(one *parked) bool { return one.key == key })
	if at < 0 {
		return nil, false, nil
	}
	one := p.parked[at]
	if one.Class != "" || one.owner != l.Owner && !one.free() {
		return nil, true, nil
	}
	one.owner, one.until = l.Owner, time.Now().Add(l.For)
	m := copyOf(one.Message)
	return &m, true, nil
}

// Renew implements driver.Parking.
func (p *Parking) Renew(ctx context.Context, l driver.Lease, messages []uuid.UUID) (kept []uuid.UUID, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.parked {
		if one.owner == l.Owner && slices.Contains(messages, one.Message.ID) {
			one.until = time.Now().Add(l.For)
			kept = append(kept, one.Message.ID)
		}
	}
	return kept, nil
}

// Fail implements driver.Parking.
func (p *Parking) Fail(ctx context.Context, owner uuid.UUID, dead inbox.DeadLetter) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	one := p.find(dead.Message.ID)
	if one == nil || one.owner != owner || one.Message.Replays != dead.Message.Replays {
		return fmt.Errorf("parking: %w", driver.ErrStale)
	}
	dead.Message = copyOf(dead.Message)
	one.DeadLetter = dead
	return nil
}

// Done implements driver.Parking.
func (p *Parking) Done(ctx context.Context, owner uuid.UUID, m *inbox.Message) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.parked = slices.DeleteFunc(p.parked, func(one *parked) bool {
		return one.Message.ID == m.ID && one.Message.Replays <= m.Replays && one.owner == owner
	})
	return nil
}

// Count implements driver.Parking.
func (p *Parking) Count(ctx context.Context, most int) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return min(len(p.parked), most), ctx.Err()
}
