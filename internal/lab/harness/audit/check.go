// Package audit compares what the clients of a ticket shop were told with what its database says happened.
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
	Refused      = "an answer that nobody should get"
	NotDelivered = "a message that took no effect"
	EffectTwice  = "a message that took effect twice"
	WrongModel   = "a read model that does not agree"
	NotAnnounced = "a change without its message"
	OverLimit    = "more admitted than the limit"
	Stuck        = "something left over"
	NeverDenied  = "a limit that denied nobody"
)

// Finding is a promise that was broken.
type Finding struct {
	Kind   string
	Detail string
}

// Report is what Check comes to.
type Report struct {
	// Findings quotes at most a few of each kind; Counts has them all.
	Findings []Finding
	Counts   map[string]int
	// Excused counts what the losses of an asynchronous failover explain.
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

// Check looks for every promise that the history breaks.
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

// noteLost finds whom the losses concern: the events, the reservations, and the users who made them.
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

// find notes a finding, unless the losses of a failover explain what happened to one of these.
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

// seatRows: a seat that is not free belongs to one reservation that has it, and the other way round.
func (c *check) seatRows() {
	holders := map[place]string{}
	for _, r := range c.Reservations {
		if r.Status != Held && r.Status != Confirmed {
			continue
		}
		for _, seat := range r.Seats {
			at := place{r.Event, seat}
			if other := holders[at]; other != "" {
				c.find(SoldTwice, about(other, r.ID), "seat %d of %s is that of %s and of %s", seat, r.Event, other, r.ID)
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

// seatChanges: a seat goes from one reservation to another by way of being free, and never once it is confirmed.
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

// confirmedSeats: no two clients were told that the same seat is theirs for good.
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

// left: nothing is under way any more, and nothing was given up.
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

// seatsPerRow is that of the shop: seats are called A1 to A10, B1 to B10 and so on.
const seatsPerRow = 10

// SeatName is how the shop calls a seat of the first 26 rows.
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
	place, _ := strconv.Atoi(name[len(letters):]) // then it is a seat that nobody has
	return (row-1)*seatsPerRow + place
}

// Told notes what a body says: of an event or a reservation, or of a problem.
func (a *Answer) Told(body []byte) {
	var v struct {
		ID, Code, Status string
		EventID          string          `json:"event_id"`
		Seats            json.RawMessage // names, or how many an event has
	}
	_ = json.Unmarshal(body, &v) // the status of a problem is a number; what else was read stays
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
	_ = json.Unmarshal(v.Seats, &names) // then the seats are none, and are found to differ
	for _, name := range names {
		a.Seats = append(a.Seats, seatNumber(name))
	}
}

// What a client asks for, the Op of an Answer.
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

// Answer is what a client was told.
type Answer struct {
	// Client gets its answers one after the other, but for those to requests that it sends twice at once.
	Client int
	Op     string
	// Key is the idempotency key, "" for a read. The key of a hold or an event is used by one user alone, and is its name.
	Key string
	// Event and Reservation are those that the request named; for what it made, those of the answer.
	Event       string
	Reservation string
	// Status is that of HTTP, 0 where no answer came; Code is that of a problem.
	Status int
	Code   string
	Body   string
	// State and Seats are the reservation's, as told.
	State string
	Seats []int
}

// What a Change is about.
const (
	OfEvent       = "event"       // it was made
	OfReservation = "reservation" // it was made, or its status changed
	OfSeat        = "seat"        // its state changed
	OfMessage     = "message"     // one was written into the outbox
	OfTaken       = "taken"       // one was entered into the inbox
	OfEffect      = "effect"      // the read model changed
)

// Change is a committed change, which a trigger has noted in its transaction.
type Change struct {
	Token uuid.UUID
	// ID ascends within what is locked by whoever changes it: a seat, a reservation.
	ID                 int64
	What               string
	Event, Reservation string
	Seat               int
	Seats              []int
	Status             string // of the reservation or the seat; of a message, its name
	User               string
	Message            uuid.UUID
}

// Reservation is a row of the shop, with what its read model knows.
type Reservation struct {
	ID, Event, User, Status string
	Seats                   []int
	Known                   string // "" where the read model has no row
	Messages                int
}

// Seat is a row of a seat that is not free.
type Seat struct {
	Event, State, Reservation string
	Number                    int
}

// Left counts what should be gone when nothing is under way any more.
type Left struct {
	Outbox, DeadOutbox, Parked, DeadInbox int
	// Due are holds that should have expired.
	Due int
}

// History is everything that is known when nothing is under way any more.
type History struct {
	Answers      []Answer
	Changes      []Change // ascending by ID
	Reservations []Reservation
	Events       []string
	Seats        []Seat
	Left         Left
	// Lost are changes that committed and that a failover to an asynchronous standby has lost. What they
	// explain is excused, and counted.
	Lost []Change
	// Limit is what the user who asks for too much was told.
	Limit Limit
	// ClockWentBack says that the clock of Postgres did so at some time.
	ClockWentBack bool
}
