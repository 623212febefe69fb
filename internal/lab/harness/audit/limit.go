package audit

import (
	"fmt"
	"net/http"
	"slices"
	"time"
)

// Limit is what became of the requests of one user, who sends more than the limit for each user admits.
type Limit struct {
	// Max is admitted in each window. Windows are aligned to the Unix epoch.
	Max    int
	Window time.Duration
	Asked  []Asked
	// Forgotten are the times at which the limiter may have lost its counts.
	Forgotten []Forgotten
}

// Asked is one such request. The limiter decides about it at some time between Sent and Answered.
type Asked struct {
	Sent, Answered time.Time
	// Status is 0 where no answer came. Such a request may have been admitted or not.
	Status int
}

// The statuses of such a request, which has no idempotency key: that is noticed once the limiter has let it pass.
const (
	StatusAdmitted  = http.StatusBadRequest
	StatusDenied    = http.StatusTooManyRequests
	StatusUndecided = http.StatusServiceUnavailable
)

// Forgotten is a time at which the limiter may have lost its counts, Times over. Each allows the limit once more.
type Forgotten struct {
	From, To time.Time
	Times    int
}

// Admitted counts what was admitted in each window, by its beginning. What may belong to either of two is left out.
func (l Limit) Admitted() map[time.Time]int {
	windows := map[time.Time]int{}
	for _, a := range l.Asked {
		window := a.Sent.UTC().Truncate(l.Window)
		if a.Status == StatusAdmitted && window.Equal(a.Answered.UTC().Truncate(l.Window)) {
			windows[window]++
		}
	}
	return windows
}

// Most is what a window may admit.
func (l Limit) Most(window time.Time) int {
	most := l.Max
	for _, f := range l.Forgotten {
		if f.From.Before(window.Add(l.Window)) && !f.To.Before(window) {
			most += f.Times * l.Max
		}
	}
	return most
}

// Empty is a finding if the limit has denied no request: the windows then show nothing of it.
func (l Limit) Empty() []Finding {
	if slices.ContainsFunc(l.Asked, func(a Asked) bool { return a.Status == StatusDenied }) {
		return nil
	}
	return []Finding{{NeverDenied, fmt.Sprintf("%d requests, and %d a window is the limit", len(l.Asked), l.Max)}}
}

// limits: no window admits more than the limit, but for what the limiter has forgotten, and what cannot be decided is refused.
func (c *check) limits() {
	for window, n := range c.Limit.Admitted() {
		if most := c.Limit.Most(window); n > most {
			c.find(OverLimit, nil, "%d in the window of %v from %v, at most %d may be", n, c.Limit.Window, window, most)
		}
	}
	for _, a := range c.Limit.Asked {
		if !slices.Contains([]int{0, StatusAdmitted, StatusDenied, StatusUndecided}, a.Status) {
			c.find(Refused, nil, "the user who asks for too much was told %d", a.Status)
		}
	}
}
