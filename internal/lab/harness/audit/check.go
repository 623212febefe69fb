package audit

import (
	"fmt"
	"net/http"
	"slices"

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
