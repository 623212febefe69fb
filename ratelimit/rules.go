package ratelimit

import "sync"

// maxRules bounds the rules that are remembered; there are as many as plans.
const maxRules = 1000

// rules remembers the rules that limits were made into, so that a limit is checked once and counters
// share it. The zero value is ready for use.
type rules struct {
	mu    sync.Mutex
	known map[Limit]*rule
}

// of returns the limit's rule, or nil if the limit is invalid.
func (r *rules) of(given Limit) *rule {
	r.mu.Lock()
	defer r.mu.Unlock()
	if known := r.known[given]; known != nil {
		return known
	}
	if given.Validate() != nil {
		return nil
	}
	if r.known == nil || len(r.known) >= maxRules {
		r.known = map[Limit]*rule{}
	}
	made := ruleOf(given)
	r.known[given] = &made
	return &made
}
