package audit

import (
	"encoding/json"
	"strconv"
	"strings"
)

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
