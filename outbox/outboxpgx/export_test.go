package outboxpgx

import "time"

// AskInterval is half of the time by which the floors lag behind.
const AskInterval = askInterval

// Horizon is a horizon whose questions are always due.
type Horizon struct{ h horizon }

// Ask records a seen number and answers a question. It returns false if no question was due.
func (h *Horizon) Ask(seen int64, writers []string) bool {
	h.h.saw(0, seen)
	h.h.asked = time.Time{}
	q := h.h.question()
	h.h.answer(q, writers)
	return q.number != 0
}

// Limit and Forget call the horizon's methods.
func (h *Horizon) Limit() int64 { seq, _ := h.h.limit(); return seq }
func (h *Horizon) Forget()      { h.h.forget() }

// Statement returns the SQL of a statement on the default table.
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
		"dead setup": deadPlansSQL, "dead choose": dead.returnable, "dead preview": dead.preview, "dead groups": dead.groups, "dead return": dead.replay, "dead remove": dead.remove,
		"dead list": dead.list,
	}[name]
}

// Claims sets the number of lanes and the bytes of bodies per claim. 0 keeps the current value.
func (s *Store) Claims(lanes int, bytes int64) *Store {
	if lanes > 0 {
		s.lanesPerClaim = lanes
	}
	if bytes > 0 {
		s.maxBatchBytes = bytes
	}
	return s
}

// SlowClaims makes the next claims read like after a slow claim.
func (s *Store) SlowClaims() { s.slow.took(slowClaim) }

// Hasten sets the timeouts of DeadLetters and Audit to d.
func (s *Store) Hasten(d time.Duration) { s.dead.readTimeout, s.dead.changeTimeout = d, d }

// Listening returns nil while notifications arrive.
func (s *Store) Listening() error { return s.listener.State() }

// RetryRefused makes the next settlement retry refused outcomes, and the next claim check whether their messages are
// gone.
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

// Explain returns an error of the server with the Store's wording.
func (s *Store) Explain(err error) error { return s.t.explain(err) }
