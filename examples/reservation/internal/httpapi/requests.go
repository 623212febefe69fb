package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
)

const maxPage = 100

func (a *api) createEvent(w http.ResponseWriter, r *http.Request) {
	wish, err := readCreateEvent(r)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	a.once(w, r, "", http.StatusCreated, func(ctx context.Context, work booking.Work) (any, error) {
		event, err := wish.Run(ctx, a.shop, work)
		return viewEvent(event), err
	})
}

func readCreateEvent(r *http.Request) (booking.CreateEvent, error) {
	var wish booking.CreateEvent
	body, err := readBody(r, "name", "seats")
	if err == nil {
		err = body.into("name", &wish.Name)
	}
	if err == nil {
		err = body.into("seats", &wish.Seats)
	}
	return wish, err
}

func (a *api) listEvents(w http.ResponseWriter, r *http.Request) {
	limit, after, err := readPage(r)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	// The list has one more than is shown, to detect a next page.
	events, err := a.backend.Events(r.Context(), after, limit+1)
	a.show(w, r, viewEvents(events, limit), err)
}

func readPage(r *http.Request) (limit int, after string, err error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return 0, "", invalid("the query is malformed")
	}
	limit = maxPage
	if text := query.Get("limit"); text != "" {
		limit, err = strconv.Atoi(text)
		if err != nil || limit < 1 || limit > maxPage {
			return 0, "", invalid("limit must be a number from 1 to " + strconv.Itoa(maxPage))
		}
	}
	after = query.Get("after")
	if !validID(after) {
		return 0, "", invalid("after must be the value of next of another page")
	}
	return limit, after, nil
}

func (a *api) showEvent(w http.ResponseWriter, r *http.Request) {
	event, err := a.backend.EventMap(r.Context(), r.PathValue("id"))
	a.show(w, r, viewMap(event), err)
}

func (a *api) showStats(w http.ResponseWriter, r *http.Request) {
	stats, err := a.backend.Stats(r.Context(), r.PathValue("id"))
	a.show(w, r, stats, err)
}

func (a *api) hold(w http.ResponseWriter, r *http.Request) {
	wish, err := readHold(r)
	if err != nil {
		a.fail(w, r, err)
		return
	}
	a.once(w, r, wish.EventID, http.StatusCreated, func(ctx context.Context, work booking.Work) (any, error) {
		reservation, err := wish.Run(ctx, a.shop, work)
		return viewReservation(reservation), err
	})
}

func readHold(r *http.Request) (booking.HoldSeats, error) {
	wish := booking.HoldSeats{User: userOf(r.Context())}
	body, err := readBody(r, "event_id", "seats", "quantity")
	if err != nil {
		return wish, err
	}
	if _, both := body["quantity"]; both && body["seats"] != nil {
		return wish, invalid("give seats or quantity, not both")
	}
	if err := body.into("event_id", &wish.EventID); err != nil {
		return wish, err
	}
	if err := body.into("seats", &wish.Seats); err != nil {
		return wish, err
	}
	if err := body.into("quantity", &wish.Quantity); err != nil {
		return wish, err
	}
	return wish, wish.Check()
}

func (a *api) confirm(w http.ResponseWriter, r *http.Request) {
	wish := booking.Confirm{User: userOf(r.Context()), ReservationID: r.PathValue("id")}
	a.settle(w, r, wish.Run)
}

func (a *api) cancel(w http.ResponseWriter, r *http.Request) {
	wish := booking.Cancel{User: userOf(r.Context()), ReservationID: r.PathValue("id")}
	a.settle(w, r, wish.Run)
}

func (a *api) settle(w http.ResponseWriter, r *http.Request, run func(context.Context, booking.Work) (booking.Reservation, error)) {
	if _, err := readBody(r); err != nil {
		a.fail(w, r, err)
		return
	}
	// The event of a reservation never changes, so this read outside of the transaction is good enough.
	seen, err := a.backend.Reservation(r.Context(), r.PathValue("id"))
	if err != nil {
		a.fail(w, r, err)
		return
	}
	a.once(w, r, seen.EventID, http.StatusOK, func(ctx context.Context, work booking.Work) (any, error) {
		reservation, err := run(ctx, work)
		return viewReservation(reservation), err
	})
}

func (a *api) showReservation(w http.ResponseWriter, r *http.Request) {
	reservation, err := a.backend.Reservation(r.Context(), r.PathValue("id"))
	a.show(w, r, viewReservation(reservation), err)
}

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
		panic(err) // views contain only JSON values
	}
	return append(body, '\n')
}

// maxBodyBytes bounds a body. With keys, their middleware reads the body first, for the fingerprint, and enforces the bound.
const maxBodyBytes = 1 << 20

// members are the members of a JSON object, by name.
type members map[string]json.RawMessage

// readBody reads the JSON object of a request. No body is an object without members.
// It is stricter than encoding/json: names are case-sensitive, and no name may come twice.
func readBody(r *http.Request, allowed ...string) (members, error) {
	data, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxBodyBytes))
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return nil, problemError{newProblem(http.StatusRequestEntityTooLarge, codeTooLarge, "the body is above the limit")}
	}
	if err != nil {
		return nil, invalid("the body could not be read")
	}
	if len(data) == 0 {
		return nil, nil
	}
	if err := checkMediaType(r.Header); err != nil {
		return nil, err
	}
	if !utf8.Valid(data) {
		return nil, invalid("the body is not UTF-8")
	}
	return parseMembers(data, allowed)
}

func checkMediaType(h http.Header) error {
	// A header that comes twice becomes a list, which is no media type.
	media, params, err := mime.ParseMediaType(strings.Join(h.Values("Content-Type"), ", "))
	charset := params["charset"]
	plain := h.Get("Content-Encoding") == "" && (charset == "" || strings.EqualFold(charset, "utf-8"))
	if err != nil || media != "application/json" || !plain {
		return problemError{newProblem(http.StatusUnsupportedMediaType, codeMediaType, "the body must be application/json")}
	}
	return nil
}

func parseMembers(data []byte, allowed []string) (members, error) {
	// Valid also bounds the nesting. The decoder's tokens do not.
	if !json.Valid(data) {
		return nil, invalid("the body is not one JSON value")
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	if open, err := dec.Token(); err != nil || open != json.Delim('{') {
		return nil, invalid("the body is not a JSON object")
	}
	found := members{}
	for dec.More() {
		token, err := dec.Token()
		if err != nil {
			return nil, invalid("the body is not JSON")
		}
		name, _ := token.(string)
		if !slices.Contains(allowed, name) {
			return nil, invalid(fmt.Sprintf("unknown member %.40q", name))
		}
		if _, twice := found[name]; twice {
			return nil, invalid(fmt.Sprintf("member %q comes twice", name))
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, invalid("the body is not JSON")
		}
		found[name] = value
	}
	return found, nil
}

// into decodes a member if it exists; null is not a value.
func (m members) into(name string, target any) error {
	value, ok := m[name]
	if !ok {
		return nil
	}
	if string(value) == "null" || json.Unmarshal(value, target) != nil {
		return invalid("member " + name + " has the wrong type")
	}
	return nil
}
