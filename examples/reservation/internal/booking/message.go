package booking

// The messages that tell the world what happened to a reservation.
const (
	MessageHeld      = "reservation.held"
	MessageConfirmed = "reservation.confirmed"
	MessageCancelled = "reservation.cancelled"
	MessageExpired   = "reservation.expired"
)

// MessageOf names the message that announces a status.
func MessageOf(s Status) string { return "reservation." + string(s) }

// Stats counts the reservations of an event by their status.
type Stats struct {
	Held      int `json:"held"`
	Confirmed int `json:"confirmed"`
	Cancelled int `json:"cancelled"`
	Expired   int `json:"expired"`
}

// Rank orders what was heard about one reservation: a held that arrives after
// a final status is old news. There is only one final status per reservation.
func (s Status) Rank() int {
	if s == StatusHeld {
		return 1
	}
	return 2
}
