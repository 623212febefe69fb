package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/reservation/shoptest"
	"github.com/holdfast-go/holdfast/outbox"
)

// check compares the stored state at the end with the answers to clients and with the committed messages.
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
	_ = json.Unmarshal(m.Body, &body) // an invalid body fails the checks below
	return status, body
}

// sales follows the messages in commit order: a seat belongs to one reservation at a time, and a reservation ends once.
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
			c.found("reservation %s is %q, its last message has %q", id, got, to)
		}
	}
}

// answers compares the answers to clients with the stored state, and finds effects without a request.
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
					c.found("reservation %s is %s, a client got %s", id, got, status)
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
			c.found("reservation %s is %s without a request", id, r.Status)
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

// events checks that every event confirmed to a client is stored. Every other stored event needs a key without a final
// answer, so that a key creates one event at most.
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

// stored returns the ids of the stored events. Each of them has seats.
func (c *checker) stored() map[string]bool {
	ids := map[string]bool{}
	for _, seat := range c.state.Seats {
		ids[seat.EventID] = true
	}
	return ids
}

// target returns the reservation in a path and the requested status.
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
			c.found("reservation %s is %s, the read model has %q", id, r.Status, r.Learned)
		}
		if r.Status == "confirmed" {
			confirmed -= len(r.Seats)
		}
	}
	if confirmed != 0 {
		c.found("confirmed reservations have %d seats too many or too few", confirmed)
	}
}

// messages checks that every committed message was published, in the order of its key, and took effect once.
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

// history has the answers to the clients and the events at the servers. It is safe for concurrent use.
type history struct {
	mu        sync.Mutex
	answers   map[string]answered // by key
	written   []written           // messages, in the order of their commits
	published []uuid.UUID         // in the broker's order
	learned   map[uuid.UUID]int   // how often each message took effect
	denied    int                 // answers that a limit was reached
	limit     int64               // requests per user and minute
	charges   []charged           // in the limiter's order
	uncharged []string            // users whose request passed the limit without a charge
}

// answered is a request with a key, and its outcome.
type answered struct {
	request
	final answer // the first final answer; zero: none arrived
}

// written is a message with the decision time of its transaction.
type written struct {
	outbox.Message
	at time.Time
}

func newHistory() history {
	return history{answers: map[string]answered{}, learned: map[uuid.UUID]int{}}
}

// sent records that a request is about to be sent.
func (h *history) sent(q request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, known := h.answers[q.key]; !known {
		h.answers[q.key] = answered{request: q}
	}
}

// heard records a final answer and returns the first one for the same key.
func (h *history) heard(q request, a answer) (first answer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	known := h.answers[q.key]
	if known.final.status == 0 {
		known.final = a
		h.answers[q.key] = known
	}
	return known.final
}

// denies records an answer that a limit was reached.
func (h *history) denies(a answer) {
	if a.status != http.StatusTooManyRequests {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.denied++
}

func (h *history) wrote(m outbox.Message, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.written = append(h.written, written{m, at})
}

func (h *history) took(id uuid.UUID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.published = append(h.published, id)
}

func (h *history) effect(id uuid.UUID, _ string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.learned[id]++
}

// isLearned reports whether every committed message has taken effect.
func (h *history) isLearned() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.learned) >= len(h.written)
}

// outcomes counts the statuses of reservations.
func (h *history) outcomes() map[string]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := map[string]int{}
	for _, m := range h.written {
		_, status, _ := strings.Cut(m.Name, ".")
		n[status]++
	}
	return n
}

// events returns the ids of the events that clients have created.
func (h *history) events() (ids []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(h.answers)) {
		if one := h.answers[key]; one.path == eventsPath && one.final.status == 201 {
			ids = append(ids, one.final.id())
		}
	}
	return ids
}

// visit records how the rate limiter treated a request.
type visit struct {
	user   string
	at     int64 // when it was charged, in milliseconds by the limiter's clock; 0: it was not
	passed bool  // it reached the idempotency key, which comes after the limit
	free   bool  // its unit was refunded
}

type visitKey struct{}

func (q request) visit(ctx context.Context) context.Context {
	return context.WithValue(ctx, visitKey{}, &visit{user: q.user})
}

// charged is a change of the limits' counters.
type charged struct {
	what  change
	visit *visit // nil: for all users
}

type change int

const (
	took     change = iota // a unit, or nothing where the request is denied
	gaveBack               // a unit
	forgot                 // all counters
)

// watch records the calls of a request to the limiter, in the limiter's order.
func (h *history) watch(ctx context.Context, step string, do func() error) func() error {
	v, _ := ctx.Value(visitKey{}).(*visit)
	if v == nil {
		return do
	}
	switch step {
	case shoptest.StepKey:
		h.mu.Lock()
		defer h.mu.Unlock()
		v.passed = true
		if v.at == 0 {
			h.uncharged = append(h.uncharged, v.user)
		}
	case shoptest.StepLimit:
		return func() error { return h.note(took, v, do) }
	case shoptest.StepRefund:
		return func() error { return h.note(gaveBack, v, do) }
	}
	return do
}

// note changes the counters and records the change, under one lock.
func (h *history) note(what change, v *visit, do func() error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := do(); err != nil {
		return err
	}
	switch {
	case what == took:
		v.at = time.Now().UnixMilli()
	case what == gaveBack && v.free:
		return nil // a unit is refunded only once
	case what == gaveBack:
		v.free = true
	}
	h.charges = append(h.charges, charged{what, v})
	return nil
}

// limitWindow is the window of the shop's limit.
const limitWindow = time.Minute

// limits checks that no user passes more often than the limit in any window, counted as a sliding window. Refunded units do
// not count. Units charged before the counters were lost do not count either: each loss allows the limit once more.
func (c *checker) limits() {
	const w = int64(limitWindow / time.Millisecond)
	type window struct {
		user   string
		number int64
	}
	counts := map[window]int64{}
	for _, one := range c.history.charges {
		v := one.visit
		switch {
		case one.what == forgot:
			clear(counts)
			continue
		case one.what == took && !v.passed:
			continue // denied, or the answer did not arrive
		}
		in := window{v.user, v.at / w}
		if one.what == gaveBack {
			counts[in] = max(0, counts[in]-1)
			continue
		}
		counts[in]++
		before := counts[window{v.user, in.number - 1}]
		if before*(w-v.at%w)+counts[in]*w > c.history.limit*w {
			c.found("%s passed for the %d. time in a minute, after %d times in the one before: the limit is %d", v.user, counts[in], before, c.history.limit)
		}
	}
	for _, user := range c.history.uncharged {
		c.found("a request of %s passed the limit and was not charged", user)
	}
}
