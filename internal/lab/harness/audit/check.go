// Package audit compares the answers to the clients of a ticket shop with the changes in its database.
package audit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
)

// The kinds of findings.
const (
	SoldTwice    = "a seat sold twice"
	NotDurable   = "a 2xx that is not durable"
	TwoAnswers   = "two answers for one key"
	TwoEffects   = "two effects of one key"
	Unexplained  = "an effect without an answer"
	Contradicts  = "answers that contradict each other"
	Refused      = "an invalid answer"
	NotDelivered = "a message that took no effect"
	EffectTwice  = "a message that took effect twice"
	WrongModel   = "a read model that does not agree"
	NotAnnounced = "a change without its message"
	OverLimit    = "more admitted than the limit"
	Stuck        = "something left over"
	NeverDenied  = "a limit that never denied"
)

// Finding is a broken promise.
type Finding struct {
	Kind   string
	Detail string
}

// Report is the result of Check.
type Report struct {
	// Findings has at most a few of each kind; Counts counts all.
	Findings []Finding
	Counts   map[string]int
	// Excused counts findings explained by the losses of an asynchronous failover.
	Excused map[string]int
}

// quoted is how many findings of each kind are quoted.
const quoted = 5

type check struct {
	History
	Report
	reservations map[string]Reservation
	lost         map[string]bool // events, reservations, and users
}

// Check returns every promise that the history breaks.
func Check(h History) Report {
	c := &check{
		History: h, Report: Report{Counts: map[string]int{}, Excused: map[string]int{}},
		reservations: map[string]Reservation{}, lost: map[string]bool{},
	}
	for _, r := range h.Reservations {
		c.reservations[r.ID] = r
	}
	c.noteLost()
	c.seatRows()
	c.seatChanges()
	c.confirmedSeats()
	c.fit()
	c.durable()
	c.keys()
	c.reads()
	c.transitions()
	c.messages()
	c.model()
	c.limits()
	c.left()
	return c.Report
}

// noteLost records the lost events and reservations, and the users who made them.
func (c *check) noteLost() {
	messages := map[uuid.UUID]string{}
	for _, change := range slices.Concat(c.Changes, c.Lost) {
		if change.What == OfMessage {
			messages[change.Message] = change.Reservation
		}
	}
	for _, change := range c.Lost {
		name := change.Reservation
		switch change.What {
		case OfTaken:
			name = messages[change.Message]
		case OfEvent:
			name = change.Event
		}
		for _, name := range []string{name, change.User} {
			if name != "" {
				c.lost[name] = true
			}
		}
	}
}

// find records a finding, unless a failover has lost one of the things in about.
func (c *check) find(kind string, about []string, format string, args ...any) {
	if slices.ContainsFunc(about, func(name string) bool { return c.lost[name] }) {
		c.Excused[kind]++
		return
	}
	if c.Counts[kind]++; c.Counts[kind] <= quoted {
		c.Findings = append(c.Findings, Finding{kind, fmt.Sprintf(format, args...)})
	}
}

func about(names ...string) []string { return names }

type place struct {
	event string
	seat  int
}

// seatRows checks that each seat that is not free belongs to exactly one reservation that has it.
func (c *check) seatRows() {
	holders := map[place]string{}
	for _, r := range c.Reservations {
		if r.Status != Held && r.Status != Confirmed {
			continue
		}
		for _, seat := range r.Seats {
			at := place{r.Event, seat}
			if other := holders[at]; other != "" {
				c.find(SoldTwice, about(other, r.ID), "seat %d of %s belongs to %s and to %s", seat, r.Event, other, r.ID)
			}
			holders[at] = r.ID
		}
	}
	for _, s := range c.Seats {
		at := place{s.Event, s.Number}
		if holders[at] != s.Reservation || c.reservations[s.Reservation].Status != s.State {
			c.find(SoldTwice, about(s.Reservation, holders[at]), "seat %d of %s is %s by %q, but the reservation that has it is %q", s.Number, s.Event, s.State, s.Reservation, holders[at])
		}
		delete(holders, at)
	}
	for at, r := range holders {
		c.find(SoldTwice, about(r), "seat %d of %s is free, but %s has it", at.seat, at.event, r)
	}
}

// seatChanges checks that a seat becomes free before it goes to another reservation, and never changes after it is
// confirmed.
func (c *check) seatChanges() {
	type state struct{ status, reservation string }
	now := map[place]state{}
	for _, change := range c.Changes {
		if change.What != OfSeat {
			continue
		}
		at, to := place{change.Event, change.Seat}, state{change.Status, change.Reservation}
		from, known := now[at]
		if !known {
			from = state{status: "free"}
		}
		now[at] = to
		ok := from.status == "free" && to.status == Held ||
			from.status == Held && (to.status == "free" || to.status == Confirmed && to.reservation == from.reservation)
		if !ok {
			c.find(SoldTwice, nil, "seat %d of %s went from %v to %v", at.seat, at.event, from, to)
		}
	}
}

// confirmedSeats checks that no seat was confirmed to two clients.
func (c *check) confirmedSeats() {
	owners := map[place]string{}
	for _, a := range c.Answers {
		if a.Op != OpConfirm || a.Status != http.StatusOK {
			continue
		}
		for _, seat := range a.Seats {
			at := place{a.Event, seat}
			if other := owners[at]; other != "" && other != a.Reservation {
				c.find(SoldTwice, about(other, a.Reservation), "seat %d of %s was confirmed to %s and to %s", seat, at.event, other, a.Reservation)
			}
			owners[at] = a.Reservation
		}
	}
}

// left checks that nothing is left under way, and nothing was given up.
func (c *check) left() {
	for what, n := range map[string]int{
		"messages in the outbox": c.Left.Outbox, "dead letters of the outbox": c.Left.DeadOutbox,
		"messages behind a dead letter": c.Left.Parked, "dead letters of the inbox": c.Left.DeadInbox, "holds that are due": c.Left.Due,
	} {
		if n > 0 {
			c.find(Stuck, nil, "%d %s", n, what)
		}
	}
}

// seatsPerRow is the shop's: seats are named A1 to A10, B1 to B10 and so on.
const seatsPerRow = 10

// SeatName returns the shop's name for a seat of the first 26 rows.
func SeatName(number int) string {
	return string(rune('A'+(number-1)/seatsPerRow)) + strconv.Itoa((number-1)%seatsPerRow+1)
}

// seatNumber is the inverse of SeatName, for seats of any row.
func seatNumber(name string) int {
	letters := strings.TrimRight(name, "0123456789")
	row := 0
	for _, letter := range letters {
		row = row*26 + int(letter-'A') + 1
	}
	place, _ := strconv.Atoi(name[len(letters):]) // an invalid name becomes a seat that nobody has
	return (row-1)*seatsPerRow + place
}

// Told stores the content of a body: an event, a reservation or a problem.
func (a *Answer) Told(body []byte) {
	var v struct {
		ID, Code, Status string
		EventID          string          `json:"event_id"`
		Seats            json.RawMessage // names, or the number of seats of an event
	}
	_ = json.Unmarshal(body, &v) // the status of a problem is a number; the other fields are still decoded
	a.Code = v.Code
	if !a.success() {
		return
	}
	if a.Op == OpEvent {
		a.Event = v.ID
		return
	}
	a.Reservation, a.Event, a.State = v.ID, v.EventID, v.Status
	var names []string
	_ = json.Unmarshal(v.Seats, &names) // without names the seats differ from the row and are reported
	for _, name := range names {
		a.Seats = append(a.Seats, seatNumber(name))
	}
}

// The operations of clients, for the Op of an Answer.
const (
	OpEvent   = "event"
	OpHold    = "hold"
	OpConfirm = "confirm"
	OpCancel  = "cancel"
	OpRead    = "read"
)

// The statuses of a reservation.
const (
	Held      = "held"
	Confirmed = "confirmed"
	Cancelled = "cancelled"
	Expired   = "expired"
)

// Answer is one answer to a client.
type Answer struct {
	// Client gets its answers one after the other, except for requests that it sends twice at once.
	Client int
	Op     string
	// Key is the idempotency key, "" for a read. The key of a hold or an event belongs to one user, who has the same name.
	Key string
	// Event and Reservation come from the request, or from the answer if the request created them.
	Event       string
	Reservation string
	// Status is the HTTP status, 0 if there was no answer. Code is the code of a problem.
	Status int
	Code   string
	Body   string
	// State and Seats are the reservation's, from the answer.
	State string
	Seats []int
}

// The kinds of things that a Change concerns.
const (
	OfEvent       = "event"       // it was made
	OfReservation = "reservation" // it was made, or its status changed
	OfSeat        = "seat"        // its state changed
	OfMessage     = "message"     // one was written into the outbox
	OfTaken       = "taken"       // one was entered into the inbox
	OfEffect      = "effect"      // the read model changed
)

// Change is a committed change, recorded by a trigger in the same transaction.
type Change struct {
	Token uuid.UUID
	// ID ascends among changes that lock the same thing: a seat, or a reservation.
	ID                 int64
	What               string
	Event, Reservation string
	Seat               int
	Seats              []int
	Status             string // of the reservation or the seat; of a message, its name
	User               string
	Message            uuid.UUID
}

// Reservation is a row of the shop, with the state in the read model.
type Reservation struct {
	ID, Event, User, Status string
	Seats                   []int
	Known                   string // "" if the read model has no row
	Messages                int
}

// Seat is the row of a seat that is not free.
type Seat struct {
	Event, State, Reservation string
	Number                    int
}

// Left counts leftovers, which should be 0 when nothing is under way.
type Left struct {
	Outbox, DeadOutbox, Parked, DeadInbox int
	// Due counts holds that should have expired.
	Due int
}

// History is all recorded data, read when nothing is under way.
type History struct {
	Answers      []Answer
	Changes      []Change // ascending by ID
	Reservations []Reservation
	Events       []string
	Seats        []Seat
	Left         Left
	// Lost are committed changes that a failover to an asynchronous standby has lost. Findings that they explain are
	// excused, and counted.
	Lost []Change
	// Limit has the answers to the user who exceeds the limit.
	Limit Limit
	// ClockWentBack means that the clock of Postgres went back at some time.
	ClockWentBack bool
}
