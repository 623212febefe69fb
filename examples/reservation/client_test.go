package main_test

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// client speaks to one shop.
type client struct {
	t    testing.TB
	url  string
	http *http.Client
}

func newClient(t testing.TB, url string) *client {
	t.Helper()
	transport := &http.Transport{MaxIdleConnsPerHost: 1000}
	t.Cleanup(transport.CloseIdleConnections)
	return &client{t, url, &http.Client{Transport: transport, Timeout: 2 * testenv.Patience}}
}

// reply is what came back.
type reply struct {
	t      testing.TB
	status int
	header http.Header
	body   []byte
}

// newUser returns a user nobody else is, with all its units of the rate limit.
func newUser() string { return "user-" + strings.ToLower(rand.Text()[:12]) }

func newKey() string { return string(idempotency.NewKey()) }

// post sends a request; body "" sends none.
func (c *client) post(user, key, path, body string) reply {
	c.t.Helper()
	r, err := c.tryPost(user, key, path, body)
	noError(c.t, err)
	return r
}

// tryPost is post for goroutines that must not end the test.
func (c *client) tryPost(user, key, path, body string) (reply, error) {
	req, err := http.NewRequest(http.MethodPost, c.url+path, bytes.NewBufferString(body))
	if err != nil {
		return reply{}, err
	}
	req.Header.Set("X-Mock-User-Id", user)
	req.Header.Set("Idempotency-Key", key)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	return c.send(req)
}

func (c *client) get(path string) reply {
	c.t.Helper()
	r, err := c.tryGet(path)
	noError(c.t, err)
	return r
}

func (c *client) tryGet(path string) (reply, error) {
	req, err := http.NewRequest(http.MethodGet, c.url+path, nil)
	if err != nil {
		return reply{}, err
	}
	return c.send(req)
}

func (c *client) send(req *http.Request) (reply, error) {
	resp, err := c.http.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return reply{c.t, resp.StatusCode, resp.Header, body}, err
}

// code is the member code of a problem, "" for other answers.
func (r reply) code() string {
	if r.header.Get("Content-Type") != "application/problem+json" {
		return ""
	}
	var p struct{ Code string }
	_ = json.Unmarshal(r.body, &p) // then the code is missing
	return p.Code
}

func (r reply) wants(status int, code string) reply {
	r.t.Helper()
	if r.status != status || r.code() != code {
		r.t.Fatalf("answer is %d %q, want %d %q: %s", r.status, r.code(), status, code, r.body)
	}
	return r
}

func (r reply) into(v any) {
	r.t.Helper()
	if err := json.Unmarshal(r.body, v); err != nil {
		r.t.Fatalf("%v in %s", err, r.body)
	}
}

type reservation struct {
	ID        string
	EventID   string `json:"event_id"`
	Seats     []string
	Status    string
	ExpiresAt time.Time `json:"expires_at"`
}

type stats struct{ Held, Confirmed, Cancelled, Expired int }

// newEvent creates an event and returns its id.
func (c *client) newEvent(body string) string {
	c.t.Helper()
	var e struct{ ID string }
	c.post(newUser(), newKey(), "/api/events", body).wants(http.StatusCreated, "").into(&e)
	return e.ID
}

func (c *client) hold(user, eventID, rest string) reservation {
	c.t.Helper()
	var r reservation
	c.post(user, newKey(), "/api/reservations", holdBody(eventID, rest)).wants(http.StatusCreated, "").into(&r)
	return r
}

func holdBody(eventID, rest string) string { return `{"event_id":"` + eventID + `",` + rest + `}` }

func (c *client) status(reservationID string) string {
	c.t.Helper()
	var r reservation
	c.get("/api/reservations/"+reservationID).wants(http.StatusOK, "").into(&r)
	return r.Status
}

func (c *client) stats(eventID string) stats {
	c.t.Helper()
	var s stats
	c.get("/api/events/"+eventID+"/stats").wants(http.StatusOK, "").into(&s)
	return s
}

// seats counts the seats of an event by state.
func (c *client) seats(eventID string) map[string]int {
	c.t.Helper()
	var m struct{ Map []struct{ State string } }
	c.get("/api/events/"+eventID).wants(http.StatusOK, "").into(&m)
	counts := map[string]int{}
	for _, seat := range m.Map {
		counts[seat.State]++
	}
	return counts
}
