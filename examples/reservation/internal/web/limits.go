package web

import (
	"context"

	"github.com/holdfast-go/holdfast/ratelimit"
)

// Peeker is a limiter that can be looked at.
type Peeker interface {
	// Peek returns what would be decided now, as if the charges had been taken, and charges nothing.
	Peek(ctx context.Context, charges ...ratelimit.Charge) (ratelimit.Decision, error)
}

// Limits are what POSTs are limited by.
type Limits struct {
	Limiter Peeker
	User    ratelimit.Limit
	Global  ratelimit.Limit // Max is 0 where there is none
}

// gauge is what is left of a limit.
type gauge struct {
	Name string `json:"name"`
	Left int64  `json:"left"`
	Max  int64  `json:"max"`
	// Reset is in how many seconds there is more.
	Reset float64 `json:"reset"`
}

// look returns the gauges of a user; nil while the limiter cannot tell all of them.
func (l Limits) look(ctx context.Context, user string) []gauge {
	charges := []ratelimit.Charge{{Limit: l.User, Key: user}}
	if l.Global.Max > 0 {
		charges = append(charges, ratelimit.Charge{Limit: l.Global})
	}
	var gauges []gauge
	for _, charge := range charges {
		d, err := l.Limiter.Peek(ctx, charge)
		if err != nil || d.Fallback {
			return nil
		}
		for _, s := range d.Limits() {
			if d.Allowed {
				s.Remaining++ // a look is answered as if its unit had been taken
			}
			gauges = append(gauges, gauge{s.Name, s.Remaining, s.Max, s.Reset.Seconds()})
		}
	}
	return gauges
}
