package httpapi

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

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
	// One more than is shown tells whether there is a next page.
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
		return 0, "", invalid("after must be the next of another page")
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
