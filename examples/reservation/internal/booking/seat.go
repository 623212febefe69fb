package booking

import (
	"strconv"
	"time"
)

// MaxSeats is the largest number of seats of one event.
const MaxSeats = 10_000

const seatsPerRow = 10

// SeatState is what the map of an event shows of a seat.
type SeatState string

// The states of a seat.
const (
	SeatFree      SeatState = "free"
	SeatHeld      SeatState = "held"
	SeatConfirmed SeatState = "confirmed"
)

// Seat is one seat of an event.
type Seat struct {
	// Number counts from 1; SeatName gives its name.
	Number int
	State  SeatState
	// ReservationID and HeldUntil belong to the reservation that has the seat; empty for a free one.
	ReservationID string
	HeldUntil     time.Time
}

// StateAt is the state at a moment: a seat whose hold is overdue is free.
func (s Seat) StateAt(now time.Time) SeatState {
	if s.State == SeatHeld && !s.HeldUntil.After(now) {
		return SeatFree
	}
	return s.State
}

// SeatName names a seat by its number: A1 to A10, B1 to B10, … Z10, AA1 and so on.
func SeatName(number int) string {
	row, place := (number-1)/seatsPerRow, (number-1)%seatsPerRow+1
	letters := ""
	for row++; row > 0; row = (row - 1) / 26 {
		letters = string(rune('A'+(row-1)%26)) + letters
	}
	return letters + strconv.Itoa(place)
}

// SeatNumber is the inverse of SeatName; false for a name no event can have.
func SeatNumber(name string) (int, bool) {
	if len(name) > len("ABC10") {
		return 0, false
	}
	row, i := 0, 0
	for ; i < len(name) && name[i] >= 'A' && name[i] <= 'Z'; i++ {
		row = row*26 + int(name[i]-'A') + 1
	}
	place, err := strconv.Atoi(name[i:])
	if err != nil || row == 0 || place < 1 || place > seatsPerRow {
		return 0, false
	}
	number := (row-1)*seatsPerRow + place
	// Comparing with the canonical name refuses A01 and A+1.
	return number, number <= MaxSeats && SeatName(number) == name
}

// SeatNames names several seats.
func SeatNames(numbers []int) []string {
	names := make([]string, len(numbers))
	for i, n := range numbers {
		names[i] = SeatName(n)
	}
	return names
}
