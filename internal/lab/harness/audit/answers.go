package audit

import (
	"net/http"
	"slices"
)

// codeInUse tells a client that another request with its key is under way.
const codeInUse = "IDEMPOTENCY_KEY_IN_USE"

// releasing are the statuses after which a key is free again: the request took no effect, or nobody knows.
var releasing = []int{0, http.StatusNotFound, http.StatusTooManyRequests, http.StatusServiceUnavailable}

// refusals are the codes by which the shop refuses an operation for good, always with 409.
var refusals = map[string][]string{
	OpHold:    {"SEATS_UNAVAILABLE"},
	OpConfirm: {"RESERVATION_NOT_HELD", "RESERVATION_EXPIRED"},
	OpCancel:  {"RESERVATION_NOT_HELD", "RESERVATION_EXPIRED"},
}

// Final reports whether the answer is the one that its key has for good.
func (a Answer) Final() bool { return !slices.Contains(releasing, a.Status) && a.Code != codeInUse }

func (a Answer) success() bool { return a.Status >= 200 && a.Status < 300 }

// fits reports whether the answer is one that its request may get. Reads pass neither the limiter nor the keys.
func (a Answer) fits() bool {
	switch a.Status {
	case 0, http.StatusServiceUnavailable:
		return true
	case http.StatusTooManyRequests:
		return a.Op != OpRead
	case http.StatusConflict:
		return a.Op != OpRead && a.Code == codeInUse || slices.Contains(refusals[a.Op], a.Code)
	case http.StatusCreated:
		return a.Op == OpEvent || a.Op == OpHold
	case http.StatusOK:
		return a.Op == OpConfirm || a.Op == OpCancel || a.Op == OpRead
	}
	return false
}

// fit: each answer is one that its request may get.
func (c *check) fit() {
	for _, a := range c.Answers {
		if !a.fits() {
			c.find(Refused, c.notThere(a), "%s of %s with key %q: %d %s", a.Op, a.Reservation, a.Key, a.Status, a.Body)
		}
	}
}

// notThere is what an answer did not find and is not there: only a failover that has lost it explains that.
func (c *check) notThere(a Answer) []string {
	_, there := c.reservations[a.Reservation]
	switch {
	case a.Status != http.StatusNotFound || there:
		return nil
	case a.Op == OpHold:
		return about(a.Event)
	default:
		return about(a.Reservation)
	}
}

// durable: what a client was told is there, as it was told.
func (c *check) durable() {
	events := map[string]bool{}
	for _, id := range c.Events {
		events[id] = true
	}
	for _, a := range c.Answers {
		if !a.success() {
			continue
		}
		r, found := c.reservations[a.Reservation]
		switch a.Op {
		case OpEvent:
			if !events[a.Event] {
				c.find(NotDurable, about(a.Event), "event %s is gone", a.Event)
			}
		case OpHold:
			if !found || r.User != a.Key || r.Event != a.Event || !slices.Equal(r.Seats, a.Seats) {
				c.find(NotDurable, about(a.Reservation, a.Key), "hold %s of key %s: told %v of %s, there is %+v", a.Reservation, a.Key, a.Seats, a.Event, r)
			}
		case OpConfirm, OpCancel:
			if want := outcome(a.Op); r.Status != want {
				c.find(NotDurable, about(a.Reservation), "%s by key %s was told to be %s and is %q", a.Reservation, a.Key, want, r.Status)
			}
		}
	}
}

func outcome(op string) string {
	if op == OpConfirm {
		return Confirmed
	}
	return Cancelled
}

// keys: each key has one answer and at most one effect, and the effect has an answer that tells of it.
func (c *check) keys() {
	first := map[string]Answer{}
	for _, a := range c.Answers {
		if a.Key == "" || !a.Final() || !a.fits() {
			continue
		}
		before, known := first[a.Key]
		if known && (before.Status != a.Status || before.Body != a.Body) {
			c.find(TwoAnswers, about(before.Reservation, a.Reservation, a.Key), "key %s: %d %s and %d %s", a.Key, before.Status, before.Body, a.Status, a.Body)
		}
		first[a.Key] = a
	}
	c.eventsOfKeys(first)
	c.holdsOfKeys(first)
	c.settled(first)
}

// eventsOfKeys: an event is there because a client was told of it, or for a key that has no final answer.
func (c *check) eventsOfKeys(answers map[string]Answer) {
	told, open := map[string]bool{}, map[string]bool{}
	for _, a := range c.Answers {
		if a.Op != OpEvent {
			continue
		}
		if _, final := answers[a.Key]; !final {
			open[a.Key] = true
		}
		if a.success() {
			told[a.Event] = true
		}
	}
	untold := slices.DeleteFunc(slices.Clone(c.Events), func(id string) bool { return told[id] })
	if len(untold) > len(open) {
		c.find(Unexplained, nil, "%d events that nobody was told of, for %d keys without a final answer: %v", len(untold), len(open), untold)
	}
}

// holdsOfKeys: a hold made one reservation if it was told to, and none if it was refused.
func (c *check) holdsOfKeys(answers map[string]Answer) {
	made := map[string]string{}
	for _, r := range c.Reservations {
		if other := made[r.User]; other != "" {
			c.find(TwoEffects, about(other, r.ID, r.User), "key %s made %s and %s", r.User, other, r.ID)
		}
		made[r.User] = r.ID
		if a, told := answers[r.User]; told && !a.success() {
			c.find(Unexplained, about(r.ID, r.User), "key %s made %s and was told %d %s", r.User, r.ID, a.Status, a.Code)
		}
	}
}

// settled: a reservation that was settled was so for one key, and whoever asked with that key was told.
func (c *check) settled(answers map[string]Answer) {
	type end struct{ reservation, status string }
	told, keys := map[end]int{}, map[string]int{}
	for _, a := range answers {
		if a.success() && (a.Op == OpConfirm || a.Op == OpCancel) {
			told[end{a.Reservation, outcome(a.Op)}]++
			keys[a.Reservation]++
		}
	}
	open := map[string]bool{} // reservations with a request that never got a final answer
	for _, a := range c.Answers {
		if _, final := answers[a.Key]; a.Key != "" && !final {
			open[a.Reservation] = true
		}
	}
	for id, n := range keys {
		if n > 1 {
			c.find(Contradicts, about(id), "%s was settled for %d keys", id, n)
		}
	}
	for id, r := range c.reservations {
		if (r.Status == Confirmed || r.Status == Cancelled) && told[end{id, r.Status}] == 0 && !open[id] {
			c.find(Unexplained, about(id), "%s is %s, and nobody was told", id, r.Status)
		}
	}
}

// reads: what a client reads never goes back behind what it was told, and is what came of it. Whether a hold has expired
// is read from the clock: where that went back, the hold may still be settled.
func (c *check) reads() {
	type seen struct{ client, reservation any }
	last := map[seen]string{}
	for _, a := range c.Answers {
		if a.Reservation == "" || !a.success() {
			continue
		}
		at := seen{a.Client, a.Reservation}
		before := last[at]
		switch {
		case before != "" && before != Held && before != a.State && a.Op == OpRead:
			c.find(Contradicts, about(a.Reservation), "%s was %s and is read as %s", a.Reservation, before, a.State)
		case c.ClockWentBack && a.State == Expired:
			continue
		case a.Op == OpRead && a.State != Held && c.reservations[a.Reservation].Status != a.State:
			c.find(NotDurable, about(a.Reservation), "%s was read as %s and is %q", a.Reservation, a.State, c.reservations[a.Reservation].Status)
		}
		if before == "" || before == Held {
			last[at] = a.State
		}
	}
}
