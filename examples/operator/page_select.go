package operator

import (
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
)

// maxPerPage is how many letters one page lists at most.
const maxPerPage = 1000

// query is what the address or the form of a request chooses. The zero query is all.
type query struct {
	url.Values
	places []place
	ids    map[string][]uuid.UUID // by place; nil: all that the selection chooses
	s      selection
}

// fields are those of a query, as forms and addresses carry them.
var fields = []string{"from", "name", "key", "class", "group", "error", "since", "until", "limit", "parked", "after", "id"}

// parseQuery reads what was chosen, of the places of a kind or of all.
func (o *Operator) parseQuery(form url.Values, kind string) (q query, err error) {
	q.Values = url.Values{}
	for _, field := range fields {
		if values := slices.DeleteFunc(slices.Clone(form[field]), func(v string) bool { return v == "" }); len(values) > 0 {
			q.Values[field] = values
		}
	}
	q.s = selection{
		Name: q.Get("name"), Key: q.Get("key"), Class: q.Get("class"), Group: q.Get("group"), ErrorContains: q.Get("error"),
		Behind: q.Get("after"),
	}
	if q.s.After, err = parseMoment(q.Get("since")); err != nil {
		return q, fmt.Errorf("since: %w", err)
	}
	if q.s.Before, err = parseMoment(q.Get("until")); err != nil {
		return q, fmt.Errorf("until: %w", err)
	}
	if text := q.Get("limit"); text != "" {
		if q.s.Limit, err = strconv.Atoi(text); err != nil || q.s.Limit < 1 || q.s.Limit > maxPerPage {
			return q, fmt.Errorf("limit must be from 1 to %d", maxPerPage)
		}
	}
	if q.places, err = o.chosen(&placeFlag{q.Values["from"]}, kind); err != nil {
		return q, err
	}
	return q, q.parseIDs()
}

// parseIDs reads the letters that were marked: the place and the id of each.
func (q *query) parseIDs() error {
	marked := q.Values["id"]
	if len(marked) > maxPerPage {
		return fmt.Errorf("at most %d messages at a time", maxPerPage)
	}
	for _, text := range marked {
		from, id, _ := strings.Cut(text, "/")
		parsed, err := uuid.Parse(id)
		if err != nil || !slices.ContainsFunc(q.places, func(p place) bool { return p.name == from }) {
			return fmt.Errorf("%.80q is no message of these", text)
		}
		if q.ids == nil {
			q.ids = map[string][]uuid.UUID{}
		}
		q.ids[from] = append(q.ids[from], parsed)
	}
	if q.ids != nil {
		q.places = slices.DeleteFunc(q.places, func(p place) bool { return q.ids[p.name] == nil })
	}
	return nil
}

// at is what is chosen of one place.
func (q query) at(p place) selection {
	if q.ids != nil {
		return selection{IDs: q.ids[p.name]}
	}
	return q.s
}

// one is the single letter that is asked for.
func (q query) one() (place, selection, error) {
	if len(q.places) != 1 || len(q.Values["id"]) != 1 {
		return place{}, selection{}, refusal{http.StatusBadRequest, "Say which message, and of which outbox or consumer."}
	}
	return q.places[0], q.at(q.places[0]), nil
}

// With is the address of the same query with other values: fields and values take turns. An empty value
// leaves the field out.
func (q query) With(pairs ...string) template.URL {
	values := url.Values{}
	for field, v := range q.Values {
		values[field] = v
	}
	for i := 0; i+1 < len(pairs); i += 2 {
		values.Del(pairs[i])
		if pairs[i+1] != "" {
			values.Set(pairs[i], pairs[i+1])
		}
	}
	return template.URL(values.Encode()) // it is escaped
}
