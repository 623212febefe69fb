package load

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/internal/runloop"
)

// Pace spreads operations evenly over time: its Wait returns rate times a second, over all callers. Who comes late,
// because an operation took long, does not wait: what was missed is made up for.
type Pace struct {
	began time.Time
	every time.Duration
	next  atomic.Int64
}

// NewPace returns a pace of so many operations a second, which begins now.
func NewPace(rate float64) *Pace {
	return &Pace{began: time.Now(), every: time.Duration(float64(time.Second) / rate)}
}

// Wait blocks until the caller's turn. Its error is that of ctx.
func (p *Pace) Wait(ctx context.Context) error {
	turn := p.began.Add(time.Duration(p.next.Add(1)-1) * p.every)
	return runloop.Sleep(ctx, time.Until(turn))
}
