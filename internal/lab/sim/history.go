package sim

import (
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
)

// history is what the clients were told and what the servers have seen. It is safe for concurrent use.
type history struct {
	mu        sync.Mutex
	answers   map[string]answered // by key
	written   []written           // messages, in the order of their commits
	published []uuid.UUID         // as the broker took them
	learned   map[uuid.UUID]int   // how often each message took effect
	denied    int                 // answers that the limit was met
	limit     int64               // how often a user may ask in a minute
	charges   []charged           // as the limiter made them
	uncharged []string            // users whose request passed the limit without a charge
}

// answered is a request with its key and what became of it.
type answered struct {
	request
	final answer // the first that was final; the zero answer: none was heard
}

// written is a message with the time at which its transaction decided on it.
type written struct {
	outbox.Message
	at time.Time
}

func newHistory() history {
	return history{answers: map[string]answered{}, learned: map[uuid.UUID]int{}}
}

// sent notes that a request is about to be sent.
func (h *history) sent(q request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, known := h.answers[q.key]; !known {
		h.answers[q.key] = answered{request: q}
	}
}

// heard notes a final answer and returns the first one to the same key.
func (h *history) heard(q request, a answer) (first answer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	known := h.answers[q.key]
	if known.final.status == 0 {
		known.final = a
		h.answers[q.key] = known
	}
	return known.final
}

// denies notes an answer that says that the limit was met.
func (h *history) denies(a answer) {
	if a.status != http.StatusTooManyRequests {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.denied++
}

func (h *history) wrote(m outbox.Message, at time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.written = append(h.written, written{m, at})
}

func (h *history) took(id uuid.UUID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.published = append(h.published, id)
}

func (h *history) effect(id uuid.UUID, _ string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.learned[id]++
}

// outcomes counts what reservations have become.
func (h *history) outcomes() map[string]int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := map[string]int{}
	for _, m := range h.written {
		_, status, _ := strings.Cut(m.Name, ".")
		n[status]++
	}
	return n
}

// events are those that clients have created.
func (h *history) events() (ids []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(h.answers)) {
		if one := h.answers[key]; one.path == eventsPath && one.final.status == 201 {
			ids = append(ids, one.final.id())
		}
	}
	return ids
}
