package audit

import (
	"maps"

	"github.com/google/uuid"
)

// transitions: a reservation is made held, once, and comes to one end, once.
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

// messages: each change of a reservation wrote one message, and each message was taken once.
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
			c.find(WrongModel, nil, "message %s was taken, and nobody wrote it", message)
		}
	}
}

// model: the read model has heard of every change, once.
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
