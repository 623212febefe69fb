package httpapi

import (
	"encoding/json"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
)

// The JSON forms of the domain.

type eventView struct {
	ID    string `json:"id"`
	Name  string `json:"name"`
	Seats int    `json:"seats"`
}

type eventsView struct {
	Events []eventView `json:"events"`
	// Next is the value of ?after= for the next page, null on the last one.
	Next *string `json:"next"`
}

type mapView struct {
	eventView
	Map []seatView `json:"map"`
}

type seatView struct {
	Seat  string            `json:"seat"`
	State booking.SeatState `json:"state"`
}

type reservationView struct {
	ID        string         `json:"id"`
	EventID   string         `json:"event_id"`
	Seats     []string       `json:"seats"`
	Status    booking.Status `json:"status"`
	ExpiresAt time.Time      `json:"expires_at"`
}

func viewEvent(e booking.Event) eventView { return eventView{e.ID, e.Name, e.Seats} }

func viewEvents(events []booking.Event, limit int) eventsView {
	v := eventsView{Events: []eventView{}}
	for _, e := range events {
		v.Events = append(v.Events, viewEvent(e))
	}
	if len(v.Events) > limit {
		v.Events = v.Events[:limit]
		v.Next = &v.Events[limit-1].ID
	}
	return v
}

func viewMap(m booking.EventMap) mapView {
	v := mapView{viewEvent(m.Event), make([]seatView, len(m.Map))}
	for i, seat := range m.Map {
		v.Map[i] = seatView{booking.SeatName(seat.Number), seat.State}
	}
	return v
}

func viewReservation(r booking.Reservation) reservationView {
	return reservationView{r.ID, r.EventID, booking.SeatNames(r.Seats), r.Status, r.ExpiresAt.UTC()}
}

func encode(v any) []byte {
	body, err := json.Marshal(v)
	if err != nil {
		panic(err) // views hold nothing that JSON cannot say
	}
	return append(body, '\n')
}
