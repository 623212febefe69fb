package audit

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"
)

// codeInUse is the code for a key whose first request still runs.
const codeInUse = "IDEMPOTENCY_KEY_IN_USE"

// releasing are the statuses after which a key is free again: the request had no effect, or that is unknown.
var releasing = []int{0, http.StatusNotFound, http.StatusTooManyRequests, http.StatusServiceUnavailable}

// refusals are the codes with which the shop rejects an operation for good, always with 409.
var refusals = map[string][]string{
	OpHold:    {"SEATS_UNAVAILABLE"},
	OpConfirm: {"RESERVATION_NOT_HELD", "RESERVATION_EXPIRED"},
	OpCancel:  {"RESERVATION_NOT_HELD", "RESERVATION_EXPIRED"},
}

// Final reports whether the answer is the final one for its key.
func (a Answer) Final() bool { return !slices.Contains(releasing, a.Status) && a.Code != codeInUse }

func (a Answer) success() bool { return a.Status >= 200 && a.Status < 300 }

// fits reports whether the request may get this answer. Reads do not pass the limiter or the keys.
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

// fit checks that each answer is allowed for its request.
func (c *check) fit() {
	for _, a := range c.Answers {
		if !a.fits() {
			c.find(Refused, c.notThere(a), "%s of %s with key %q: %d %s", a.Op, a.Reservation, a.Key, a.Status, a.Body)
		}
	}
}

// notThere returns the event or reservation that is missing according to the answer. Only a failover that lost it explains
// that.
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

// durable checks that everything confirmed to a client is stored as confirmed.
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
				c.find(NotDurable, about(a.Reservation, a.Key), "hold %s of key %s: the answer has %v of %s, the row is %+v", a.Reservation, a.Key, a.Seats, a.Event, r)
			}
		case OpConfirm, OpCancel:
			if want := outcome(a.Op); r.Status != want {
				c.find(NotDurable, about(a.Reservation), "%s: key %s got status %s, the row has %q", a.Reservation, a.Key, want, r.Status)
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

// keys checks that each key has one answer and at most one effect, and that each effect has an answer that reports it.
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

// eventsOfKeys checks that each event was confirmed to a client, or belongs to a key without a final answer.
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
		c.find(Unexplained, nil, "%d unconfirmed events for %d keys without a final answer: %v", len(untold), len(open), untold)
	}
}

// holdsOfKeys checks that a successful hold made one reservation, and a rejected one none.
func (c *check) holdsOfKeys(answers map[string]Answer) {
	made := map[string]string{}
	for _, r := range c.Reservations {
		if other := made[r.User]; other != "" {
			c.find(TwoEffects, about(other, r.ID, r.User), "key %s made %s and %s", r.User, other, r.ID)
		}
		made[r.User] = r.ID
		if a, told := answers[r.User]; told && !a.success() {
			c.find(Unexplained, about(r.ID, r.User), "key %s made %s and got the answer %d %s", r.User, r.ID, a.Status, a.Code)
		}
	}
}

// settled checks that a reservation was settled by one key, and that the clients with that key got that answer.
func (c *check) settled(answers map[string]Answer) {
	type end struct{ reservation, status string }
	told, keys := map[end]int{}, map[string]int{}
	for _, a := range answers {
		if a.success() && (a.Op == OpConfirm || a.Op == OpCancel) {
			told[end{a.Reservation, outcome(a.Op)}]++
			keys[a.Reservation]++
		}
	}
	open := map[string]bool{} // reservations with a request without a final answer
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
			c.find(Unexplained, about(id), "%s is %s without an answer to any client", id, r.Status)
		}
	}
}

// reads checks that a read never shows an older state than an earlier answer, and that it agrees with the outcome. Whether a
// hold has expired depends on the clock: if the clock went back, the hold may still be settled.
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

// transitions checks that a reservation is made held once, and gets one final status once.
func (c *check) transitions() {
	now := map[string]string{}
	for _, change := range c.Changes {
		if change.What != OfReservation {
			continue
		}
		from, known := now[change.Reservation]
		ok := !known && change.Status == Held || known && from == Held && change.Status != Held
		if !ok {
			c.find(TwoEffects, about(change.Reservation), "%s went from %q to %q", change.Reservation, from, change.Status)
		}
		now[change.Reservation] = change.Status
	}
	for _, r := range c.Reservations {
		if now[r.ID] != r.Status {
			c.find(TwoEffects, about(r.ID), "%s is %s, but it was made %q", r.ID, r.Status, now[r.ID])
		}
	}
}

// messages checks that each change of a reservation wrote one message, and that each message was processed once.
func (c *check) messages() {
	changes, written, taken := map[string]int{}, map[string]int{}, map[uuid.UUID]int{}
	of := map[uuid.UUID]string{}
	for _, change := range c.Changes {
		switch change.What {
		case OfReservation:
			changes[change.Reservation]++
		case OfMessage:
			written[change.Reservation]++
			of[change.Message] = change.Reservation
		case OfTaken:
			taken[change.Message]++
		}
	}
	for id, n := range changes {
		if written[id] != n {
			c.find(NotAnnounced, about(id), "%d changes of %s wrote %d messages", n, id, written[id])
		}
	}
	for message, reservation := range of {
		switch n := taken[message]; {
		case n == 0:
			c.find(NotDelivered, about(reservation), "message %s of %s", message, reservation)
		case n > 1:
			c.find(EffectTwice, about(reservation), "message %s of %s was taken %d times", message, reservation, n)
		}
	}
	for _, change := range c.Lost {
		if change.What == OfMessage {
			of[change.Message] = change.Reservation
		}
	}
	for message := range maps.Keys(taken) {
		if of[message] == "" {
			c.find(WrongModel, nil, "message %s was taken but never written", message)
		}
	}
}

// model checks that the read model has every change exactly once.
func (c *check) model() {
	effects := map[string]int{}
	for _, change := range c.Changes {
		if change.What == OfEffect {
			effects[change.Reservation]++
		}
	}
	changes := map[string]int{}
	for _, change := range c.Changes {
		if change.What == OfReservation {
			changes[change.Reservation]++
		}
	}
	for _, r := range c.Reservations {
		switch n := changes[r.ID]; {
		case r.Messages > n || effects[r.ID] > n:
			c.find(EffectTwice, about(r.ID), "%d changes of %s took effect %d times", n, r.ID, max(r.Messages, effects[r.ID]))
		case r.Known != r.Status || r.Messages != n || effects[r.ID] != n:
			c.find(WrongModel, about(r.ID), "%s is %s after %d changes, known as %q after %d messages", r.ID, r.Status, n, r.Known, r.Messages)
		}
	}
}

// Untaken counts the messages that have taken no effect and are not lost.
func (h History) Untaken() int {
	left := map[uuid.UUID]bool{}
	for _, c := range h.Changes {
		if c.What == OfMessage {
			left[c.Message] = true
		}
	}
	for _, of := range [][]Change{h.Changes, h.Lost} {
		for _, c := range of {
			if c.What == OfTaken {
				delete(left, c.Message)
			}
		}
	}
	return len(left)
}

// Limit has the requests of one user, who sends more than the limit per user allows.
type Limit struct {
	// Max is the limit for each window. Windows are aligned to the Unix epoch.
	Max    int
	Window time.Duration
	Asked  []Asked
	// Forgotten are the times at which the limiter may have lost its counts.
	Forgotten []Forgotten
}

// Asked is one such request. The limiter decides about it between Sent and Answered.
type Asked struct {
	Sent, Answered time.Time
	// Status is 0 if there was no answer. Then it is unknown whether the request was admitted.
	Status int
}

// The statuses of such a request. It has no idempotency key, which the shop checks after the limiter.
const (
	StatusAdmitted  = http.StatusBadRequest
	StatusDenied    = http.StatusTooManyRequests
	StatusUndecided = http.StatusServiceUnavailable
)

// Forgotten is a time at which the limiter may have lost its counts Times over. Each loss allows the limit once more.
type Forgotten struct {
	From, To time.Time
	Times    int
}

// Admitted counts the admitted requests by the start of their window. It leaves out requests that may belong to either of
// two windows.
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

// Most returns how many requests a window may admit.
func (l Limit) Most(window time.Time) int {
	most := l.Max
	for _, f := range l.Forgotten {
		if f.From.Before(window.Add(l.Window)) && !f.To.Before(window) {
			most += f.Times * l.Max
		}
	}
	return most
}

// Empty returns a finding if the limit has denied no request, because then the windows prove nothing.
func (l Limit) Empty() []Finding {
	if slices.ContainsFunc(l.Asked, func(a Asked) bool { return a.Status == StatusDenied }) {
		return nil
	}
	return []Finding{{NeverDenied, fmt.Sprintf("%d requests, and %d a window is the limit", len(l.Asked), l.Max)}}
}

// limits checks that no window admits more than the limit plus the allowance for lost counts, and that undecidable requests
// are rejected.
func (c *check) limits() {
	for window, n := range c.Limit.Admitted() {
		if most := c.Limit.Most(window); n > most {
			c.find(OverLimit, nil, "%d in the window of %v from %v, at most %d may be", n, c.Limit.Window, window, most)
		}
	}
	for _, a := range c.Limit.Asked {
		if !slices.Contains([]int{0, StatusAdmitted, StatusDenied, StatusUndecided}, a.Status) {
			c.find(Refused, nil, "the user over the limit got %d", a.Status)
		}
	}
}
