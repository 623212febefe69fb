package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
)

const (
	// hallEvents is how many events the clients share. Holds of one event wait for each other.
	hallEvents = 50
	// hallSeats is how many seats there are for each second, more than any shop here can sell.
	hallSeats = 5000
	// longestAnswer is more than any answer of a shop.
	longestAnswer = 1 << 20
	// answerTimeout is above the time that a shop allows itself.
	answerTimeout = 70 * time.Second
)

// What clients hear who have their seat, and who came too late for it.
const (
	answerHeld  = "201"
	answerTaken = "409 SEATS_UNAVAILABLE"
)

// answers counts what clients were told, by status and code.
type answers map[string]int

func (a answers) add(more answers) {
	for kind, n := range more {
		a[kind] += n
	}
}

// errors counts what a shop must not answer.
func (a answers) errors() (n int) {
	for kind, times := range a {
		status, _, _ := strings.Cut(kind, " ")
		if !strings.HasPrefix(status, "2") && !slices.Contains([]string{"409", "429", "503"}, status) {
			n += times
		}
	}
	return n
}

func (a answers) String() string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(a)) {
		parts = append(parts, fmt.Sprintf("%d × %s", a[kind], kind))
	}
	return strings.Join(parts, ", ")
}

// hall is a shop with seats to hold, as its clients see it.
type hall struct {
	url    string
	http   *http.Client
	events []hallEvent
	next   atomic.Int64

	mu   sync.Mutex
	told answers
}

type hallEvent struct {
	id    string
	seats []string
}

// openHall creates events with enough seats for so long.
func openHall(ctx context.Context, url string, clients int, length time.Duration) (*hall, error) {
	h := &hall{
		url: url, told: answers{},
		http: &http.Client{Timeout: answerTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: clients}},
	}
	seats := max(1, int(hallSeats*length.Seconds()/hallEvents))
	for range hallEvents {
		e, err := h.newEvent(ctx, seats)
		if err != nil {
			h.close()
			return nil, err
		}
		h.events = append(h.events, e)
	}
	return h, nil
}

func (h *hall) close() { h.http.CloseIdleConnections() }

func (h *hall) newEvent(ctx context.Context, seats int) (hallEvent, error) {
	var e struct {
		ID  string
		Map []struct{ Seat string }
	}
	kind, err := h.post(ctx, "owner", "/api/events", fmt.Appendf(nil, `{"name":"Concert","seats":%d}`, seats), &e)
	if err == nil && kind != "201" {
		err = fmt.Errorf("an event with %d seats: %s", seats, kind)
	}
	if err != nil {
		return hallEvent{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, h.url+"/api/events/"+e.ID, nil)
	if err != nil {
		return hallEvent{}, err
	}
	if _, err := h.send(req, &e); err != nil {
		return hallEvent{}, err
	}
	event := hallEvent{id: e.ID}
	for _, s := range e.Map {
		event.seats = append(event.seats, s.Seat)
	}
	return event, nil
}

// hold asks for a seat that is free, and each tenth time for the one that the client before asked for.
func (h *hall) hold(ctx context.Context, client int) error {
	n := int(h.next.Add(1))
	n -= n / 10
	event, place := h.events[n%hallEvents], n/hallEvents
	if place >= len(event.seats) {
		return fmt.Errorf("all %d seats are held", hallEvents*len(event.seats))
	}
	body := fmt.Appendf(nil, `{"event_id":%q,"seats":[%q]}`, event.id, event.seats[place])
	kind, err := h.post(ctx, "client-"+strconv.Itoa(client), "/api/reservations", body, nil)
	if err != nil {
		kind = "no answer"
	}
	h.mu.Lock()
	h.told[kind]++
	h.mu.Unlock()
	if kind != answerHeld && kind != answerTaken {
		return errGaveUp
	}
	return nil
}

// takeAnswers returns what clients were told since the last call.
func (h *hall) takeAnswers() answers {
	h.mu.Lock()
	defer h.mu.Unlock()
	told := h.told
	h.told = answers{}
	return told
}

func (h *hall) post(ctx context.Context, user, path string, body []byte, into any) (kind string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url+path, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Mock-User-Id", user)
	req.Header.Set(idempotency.Header, string(idempotency.NewKey()))
	return h.send(req, into)
}

// send returns the status of the answer, and the code of a problem behind it. into gets what is no problem.
func (h *hall) send(req *http.Request, into any) (kind string, err error) {
	resp, err := h.http.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, longestAnswer))
	if err != nil {
		return "", err
	}
	kind = strconv.Itoa(resp.StatusCode)
	if resp.StatusCode >= http.StatusBadRequest {
		var problem struct{ Code string }
		_ = json.Unmarshal(body, &problem) // then it has none
		return strings.TrimSpace(kind + " " + problem.Code), nil
	}
	if into != nil {
		err = json.Unmarshal(body, into)
	}
	return kind, err
}
