package sim

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
)

// check compares what is stored at the end with what the clients were told and with what was committed.
func check(h *history, s shoptest.State) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := &checker{history: h, state: s, orders: map[uuid.UUID]int{}}
	c.sales()
	c.answers()
	c.events()
	c.rows()
	c.messages()
	c.limits()
	return c.findings
}

type checker struct {
	history  *history
	state    shoptest.State
	orders   map[uuid.UUID]int // of written messages, by their ids
	findings []string
}

func (c *checker) found(format string, args ...any) {
	c.findings = append(c.findings, fmt.Sprintf(format, args...))
}

// message is the body of a message.
type message struct {
	Reservation string    `json:"reservation_id"`
	Event       string    `json:"event_id"`
	ExpiresAt   time.Time `json:"expires_at"`
	Seats       []string
}

func read(m written) (status string, body message) {
	_, status, _ = strings.Cut(m.Name, ".")
	_ = json.Unmarshal(m.Body, &body) // what does not parse fits nothing below
	return status, body
}

// sales follows the messages in the order of their commits: a seat is given to one reservation at a
// time, and a reservation ends once.
func (c *checker) sales() {
	holder, status := map[string]string{}, map[string]string{}
	for i, m := range c.history.written {
		if _, again := c.orders[m.ID]; again {
			c.found("message %s was committed twice", m.ID)
		}
		c.orders[m.ID] = i
		to, body := read(m)
		before := status[body.Reservation]
		if to == "held" && before != "" || to != "held" && before != "held" {
			c.found("reservation %s went from %q to %q", body.Reservation, before, to)
		}
		status[body.Reservation] = to
		if early := body.ExpiresAt.Sub(m.at); to == "expired" && early > 0 || to == "confirmed" && early <= 0 {
			c.found("reservation %s was %s at %v, its deadline is %v", body.Reservation, to, m.at.Format(time.TimeOnly), body.ExpiresAt.Format(time.TimeOnly))
		}
		for _, name := range body.Seats {
			seat := body.Event + " " + name
			if other := holder[seat]; to == "held" && other != "" {
				c.found("seat %s was sold to %s, and %s has it", seat, body.Reservation, other)
			}
			switch to {
			case "held":
				holder[seat] = body.Reservation
			case "cancelled", "expired":
				delete(holder, seat)
			}
		}
	}
	for id, to := range status {
		if got := c.state.Reservations[id].Status; got != to {
			c.found("reservation %s is %q, its last message says %q", id, got, to)
		}
	}
}

// answers compares what clients were told with what is stored, and looks for effects that nobody asked for.
func (c *checker) answers() {
	told := map[string]bool{}    // reservations
	maybe := map[string]int{}    // holds by user, of clients that gave up
	ended := map[string]string{} // statuses that clients asked for, by reservation
	open := map[string]bool{}    // reservation and status that may have been reached
	for _, key := range slices.Sorted(maps.Keys(c.history.answers)) {
		one := c.history.answers[key]
		switch {
		case one.path == eventsPath: // see events
		case one.path == "/api/reservations":
			c.hold(one, told, maybe)
		default:
			id, status := target(one.path)
			if one.final.status == 0 {
				open[id+status] = true
			} else if one.final.status == 200 {
				ended[id] = status
				if got := c.state.Reservations[id].Status; got != status {
					c.found("reservation %s is %s, a client was told %s", id, got, status)
				}
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(c.state.Reservations)) {
		r := c.state.Reservations[id]
		if !told[id] {
			if maybe[r.User]--; maybe[r.User] < 0 {
				c.found("reservation %s of %s: no request explains it", id, r.User)
			}
		}
		if (r.Status == "confirmed" || r.Status == "cancelled") && ended[id] != r.Status && !open[id+r.Status] {
			c.found("reservation %s is %s, which nobody asked for", id, r.Status)
		}
	}
}

func (c *checker) hold(one answered, told map[string]bool, maybe map[string]int) {
	switch one.final.status {
	case 0:
		maybe[one.user]++
	case 201:
		id := one.final.id()
		if told[id] {
			c.found("reservation %s answers two keys", id)
		}
		told[id] = true
		if r, ok := c.state.Reservations[id]; !ok || r.User != one.user {
			c.found("reservation %s of %s is not stored", id, one.user)
		}
	}
}

// events: every event that a client was told of is stored. Each other stored event needs a key that got no final answer, so
// a key creates one event at most.
func (c *checker) events() {
	told, maybe := map[string]bool{}, 0
	stored := c.stored()
	for _, key := range slices.Sorted(maps.Keys(c.history.answers)) {
		one := c.history.answers[key]
		switch {
		case one.path != eventsPath:
		case one.final.status == 0:
			maybe++
		case one.final.status/100 == 2:
			id := one.final.id()
			if told[id] {
				c.found("event %s answers two keys", id)
			}
			told[id] = true
			if !stored[id] {
				c.found("event %s is not stored", id)
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(stored)) {
		if told[id] {
			continue
		}
		if maybe--; maybe < 0 {
			c.found("event %s: no request explains it", id)
		}
	}
}

// stored are the ids of the stored events, each of which has seats.
func (c *checker) stored() map[string]bool {
	ids := map[string]bool{}
	for _, seat := range c.state.Seats {
		ids[seat.EventID] = true
	}
	return ids
}

// target is the reservation of a path and the status that it asks for.
func target(path string) (id, status string) {
	id, verb, _ := strings.Cut(strings.TrimPrefix(path, "/api/reservations/"), "/")
	return id, map[string]string{"confirm": "confirmed", "cancel": "cancelled"}[verb]
}

// rows compares the stored rows with each other.
func (c *checker) rows() {
	confirmed := 0
	for _, seat := range c.state.Seats {
		r := c.state.Reservations[seat.Reservation]
		switch {
		case seat.State == "free" && seat.Reservation == "":
		case seat.State == "confirmed" && r.Status == "confirmed" && seat.EventID == r.EventID && slices.Contains(r.Seats, seat.Name):
			confirmed++
		default:
			c.found("seat %s is %s of %q, which is %q", seat.Name, seat.State, seat.Reservation, r.Status)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(c.state.Reservations)) {
		r := c.state.Reservations[id]
		if r.Status == "held" {
			c.found("reservation %s is still held, due at %s", id, r.ExpiresAt.Format("15:04:05"))
		}
		if r.Learned != r.Status {
			c.found("reservation %s is %s, the read model says %q", id, r.Status, r.Learned)
		}
		if r.Status == "confirmed" {
			confirmed -= len(r.Seats)
		}
	}
	if confirmed != 0 {
		c.found("confirmed reservations have %d seats too many or too few", confirmed)
	}
}

// messages: every committed message was published, those of a key in their order, and took effect once.
func (c *checker) messages() {
	seen, last := map[uuid.UUID]bool{}, map[string]int{}
	for _, id := range c.history.published {
		at, known := c.orders[id]
		if !known {
			c.found("message %s was published and never committed", id)
			continue
		}
		if seen[id] {
			continue
		}
		seen[id] = true
		key := c.history.written[at].Key
		if before, any := last[key]; any && at < before {
			c.found("message %s of %s was published after a later one", id, key)
		}
		last[key] = at
	}
	for _, m := range c.history.written {
		if !seen[m.ID] {
			c.found("message %s %s was not published", m.Name, m.ID)
		}
		if n := c.history.learned[m.ID]; n != 1 {
			c.found("message %s %s took effect %d times", m.Name, m.ID, n)
		}
	}
	if len(c.history.learned) > len(c.history.written) {
		c.found("%d messages took effect, %d were committed", len(c.history.learned), len(c.history.written))
	}
	for what, n := range map[string]int{
		"messages in the outbox": c.state.Outbox, "messages in the queue": c.state.Queue,
		"dead letters": c.state.Dead, "keys in use": c.state.Claims,
	} {
		if n != 0 {
			c.found("%d %s are left", n, what)
		}
	}
}
