package outboxpgx

import "time"

// AskInterval is for how long the floors lag behind, twice.
const AskInterval = askInterval

// Horizon is a horizon whose questions need no waiting.
type Horizon struct{ h horizon }

// Ask sees a number and has a question answered; false: nothing was asked.
func (h *Horizon) Ask(seen int64, writers []string) bool {
	h.h.saw(0, seen)
	h.h.asked = time.Time{}
	q := h.h.question()
	h.h.answer(q, writers)
	return q.number != 0
}

// Limit and Forget are the horizon's.
func (h *Horizon) Limit() int64 { seq, _ := h.h.limit(); return seq }
func (h *Horizon) Forget()      { h.h.forget() }

// Statement is the SQL of a statement on the default table.
func Statement(name string) string {
	t, err := tablesOf("", defaultTable)
	if err != nil {
		panic(err)
	}
	s, dead := t.statements(), t.deadStatements()
	return map[string]string{
		"setup": settingsSQL, "lower": s.lower, "claim": s.claim, "read": s.read, "read runs": s.readRuns, "alone": s.countLosses,
		"overdue": s.lockDue, "hold due": s.holdDue, "hold": s.holdReady, "release": s.release,
		"settle": s.settle, "look": s.look, "prune": t.due(0)[2].DeleteSQL(), "stats": t.fill(statsSQL),
		"dead setup": deadPlansSQL, "dead choose": dead.returnable, "dead return": dead.replay, "dead remove": dead.remove,
		"dead list": dead.list,
	}[name]
}

// Claims has every claim take so many lanes, and at most so many bytes of bodies. 0: as it is.
func (s *Store) Claims(lanes int, bytes int64) *Store {
	if lanes > 0 {
		s.lanesPerClaim = lanes
	}
	if bytes > 0 {
		s.maxBatchBytes = bytes
	}
	return s
}

// SlowClaims has the next claims read as after a slow one.
func (s *Store) SlowClaims() { s.slow.took(slowClaim) }

// Hasten makes the calls of DeadLetters and Audit wait for d instead of as long as they do.
func (s *Store) Hasten(d time.Duration) { s.dead.readTimeout, s.dead.changeTimeout = d, d }

// Listening returns nil while notifications arrive.
func (s *Store) Listening() error { return s.listener.State() }

// RetryRefused has the next settlement try what was refused again, and the next claim look what became of it.
func (s *Store) RetryRefused() {
	s.refusals.mu.Lock()
	defer s.refusals.mu.Unlock()
	s.refusals.looked = time.Time{}
	for _, known := range s.refusals.byID {
		known.tried = time.Time{}
	}
	s.refusedDue.mu.Lock()
	defer s.refusedDue.mu.Unlock()
	s.refusedDue.byID = nil
}

// Explain words an error of the server as the Store does.
func (s *Store) Explain(err error) error { return s.t.explain(err) }
