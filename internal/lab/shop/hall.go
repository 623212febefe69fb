package shop

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
	"github.com/holdfast-go/holdfast/internal/lab/load"
)

const (
	// hallEvents is how many events the clients share. Holds of one event wait for each other.
	hallEvents = 50
	// seatsPerSecond is more than any shop here can sell.
	seatsPerSecond = 5000
	// longestAnswer is more than any answer of a shop.
	longestAnswer = 1 << 20
	// answerTimeout is above the time that a shop allows itself.
	answerTimeout = 70 * time.Second
)

// What clients hear who have their seat, and who came too late for it.
const (
	AnswerHeld  = "201"
	AnswerTaken = "409 SEATS_UNAVAILABLE"
)

// Answers counts what clients were told, by status and code.
type Answers map[string]int

// Add counts those of more, too.
func (a Answers) Add(more Answers) {
	for kind, n := range more {
		a[kind] += n
	}
}

// Errors counts what a shop must not answer.
func (a Answers) Errors() (n int) {
	for kind, times := range a {
		status, _, _ := strings.Cut(kind, " ")
		if !strings.HasPrefix(status, "2") && !slices.Contains([]string{"409", "429", "503"}, status) {
			n += times
		}
	}
	return n
}

// Unavailable counts the answers 503: a client is told to ask again.
func (a Answers) Unavailable() (n int) {
	for kind, times := range a {
		if status, _, _ := strings.Cut(kind, " "); status == "503" {
			n += times
		}
	}
	return n
}

// All counts all answers.
func (a Answers) All() (n int) {
	for _, times := range a {
		n += times
	}
	return n
}

func (a Answers) String() string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(a)) {
		parts = append(parts, fmt.Sprintf("%d × %s", a[kind], kind))
	}
	return strings.Join(parts, ", ")
}

// Hall is a shop with seats to hold, as its clients see it. Its methods may be called from many goroutines.
type Hall struct {
	url    string
	http   *http.Client
	events []hallEvent
	next   atomic.Int64

	mu   sync.Mutex
	told Answers
}

type hallEvent struct {
	id    string
	seats []string
}

// EnoughSeats returns how many seats no shop here sells in that time.
func EnoughSeats(length time.Duration) int { return int(seatsPerSecond * length.Seconds()) }

// OpenHall creates events with so many seats together, for so many clients at a time.
func OpenHall(ctx context.Context, url string, clients, seats int) (*Hall, error) {
	h := &Hall{
		url: url, told: Answers{},
		http: &http.Client{Timeout: answerTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: clients}},
	}
	for range hallEvents {
		e, err := h.newEvent(ctx, max(1, seats/hallEvents))
		if err != nil {
			h.Close()
			return nil, err
		}
		h.events = append(h.events, e)
	}
	return h, nil
}

// Close drops the connections of the clients.
func (h *Hall) Close() { h.http.CloseIdleConnections() }

func (h *Hall) newEvent(ctx context.Context, seats int) (hallEvent, error) {
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

// Hold asks for a seat that is free, and each tenth time for the one that the client before asked for.
func (h *Hall) Hold(ctx context.Context, client int) error {
	event, place := h.turn()
	if place >= len(event.seats) {
		return fmt.Errorf("all %d seats are held", hallEvents*len(event.seats))
	}
	_, kind := h.hold(ctx, client, event, place)
	if kind != AnswerHeld && kind != AnswerTaken {
		return load.ErrGaveUp
	}
	return nil
}

// Visit is Hold in a hall whose seats come back: each fourth client cancels, and the holds of the others
// expire. After the last seat comes the first.
func (h *Hall) Visit(ctx context.Context, client int) error {
	event, place := h.turn()
	id, kind := h.hold(ctx, client, event, place%len(event.seats))
	if kind == AnswerHeld && place%4 == 0 {
		kind = h.count(h.post(ctx, userOf(client), "/api/reservations/"+id+"/cancel", []byte("{}"), nil))
		if kind == "200" {
			return nil
		}
	}
	if kind != AnswerHeld && kind != AnswerTaken {
		return load.ErrGaveUp
	}
	return nil
}

// turn chooses the event and the place of the next client.
func (h *Hall) turn() (event hallEvent, place int) {
	n := int(h.next.Add(1))
	n -= n / 10
	return h.events[n%hallEvents], n / hallEvents
}

func (h *Hall) hold(ctx context.Context, client int, event hallEvent, place int) (id, kind string) {
	body := fmt.Appendf(nil, `{"event_id":%q,"seats":[%q]}`, event.id, event.seats[place])
	var made struct{ ID string }
	kind = h.count(h.post(ctx, userOf(client), "/api/reservations", body, &made))
	return made.ID, kind
}

func userOf(client int) string { return "client-" + strconv.Itoa(client) }

// count notes an answer, or that there was none.
func (h *Hall) count(kind string, err error) string {
	if err != nil {
		kind = "no answer"
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.told[kind]++
	return kind
}

// TakeAnswers returns what clients were told since the last call.
func (h *Hall) TakeAnswers() Answers {
	h.mu.Lock()
	defer h.mu.Unlock()
	told := h.told
	h.told = Answers{}
	return told
}

func (h *Hall) post(ctx context.Context, user, path string, body []byte, into any) (kind string, err error) {
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
func (h *Hall) send(req *http.Request, into any) (kind string, err error) {
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
