package harness

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

// answerTimeout is longer than the shop takes for any request.
const answerTimeout = 90 * time.Second

// request is one that may be sent again and again.
type request struct {
	op, key, user   string
	method          string // "" is POST
	path, body      string
	event, reserved string // whom it is about
}

func newKey() string { return string(idempotency.NewKey()) }

// holdRequest holds seats for the user that has the name of the key.
func holdRequest(key, event, wish string) request {
	return request{op: audit.OpHold, key: key, user: key, path: "/api/reservations", body: `{"event_id":"` + event + `",` + wish + `}`, event: event}
}

func settleRequest(op, key, user string, held audit.Answer) request {
	return request{op: op, key: key, user: user, path: "/api/reservations/" + held.Reservation + "/" + op, body: "{}", event: held.Event, reserved: held.Reservation}
}

// newEvent returns the id of a new event, "" if it could not be made.
func (c *Crowd) newEvent(ctx context.Context, client, seats int) string {
	key := newKey()
	body := fmt.Sprintf(`{"name":"Stadium","seats":%d}`, seats)
	return c.insist(ctx, client, request{op: audit.OpEvent, key: key, user: key, path: "/api/events", body: body}, nil).Event
}

// read looks at a reservation, once.
func (c *Crowd) read(ctx context.Context, client int, held audit.Answer) {
	r := request{op: audit.OpRead, user: held.Key, method: http.MethodGet, path: "/api/reservations/" + held.Reservation, event: held.Event, reserved: held.Reservation}
	c.send(ctx, client, client, r)
}

// insist sends a request again, through any api, until it gets its final answer. With a source of chance it is sometimes
// sent twice at once: the second goes through another api, and nobody waits for its answer, which may never come.
func (c *Crowd) insist(ctx context.Context, client int, r request, rng *rand.Rand) audit.Answer {
	if rng != nil && rng.IntN(4) == 0 {
		c.twins.Go(func() {
			waiting, cancel := context.WithTimeout(ctx, answerPatience)
			defer cancel()
			c.send(waiting, client, client+1, r)
		})
	}
	waiting, cancel := context.WithTimeout(ctx, answerPatience)
	defer cancel()
	for try := client; ; try++ {
		a := c.send(waiting, client, try, r)
		if a.Final() || a.Status == http.StatusNotFound {
			return a
		}
		if err := runloop.Sleep(waiting, 50*time.Millisecond); err != nil {
			c.mu.Lock()
			c.unmet = append(c.unmet, fmt.Sprintf("%s with key %s: %d %s after %v", r.op, r.key, a.Status, a.Body, answerPatience))
			c.mu.Unlock()
			return a
		}
	}
}

// send sends a request to one of the apis, once, and notes the answer.
func (c *Crowd) send(ctx context.Context, client, api int, r request) audit.Answer {
	a := audit.Answer{Client: client, Op: r.op, Key: r.key, Event: r.event, Reservation: r.reserved}
	c.sent.Add(1)
	began := time.Now()
	body, status, err := c.exchange(ctx, api, r)
	if err == nil {
		a.Status, a.Body = status, string(body)
		a.Told(body)
		c.took(time.Since(began))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answers = append(c.answers, a)
	return a
}

func (c *Crowd) exchange(ctx context.Context, api int, r request) ([]byte, int, error) {
	apis := c.apis()
	url := apis[api%len(apis)]
	if url == "" {
		return nil, 0, fmt.Errorf("the api does not listen")
	}
	req, err := http.NewRequestWithContext(ctx, cmp.Or(r.method, http.MethodPost), url+r.path, strings.NewReader(r.body))
	if err != nil {
		return nil, 0, err
	}
	req.Header.Set("X-Mock-User-Id", r.user)
	if r.key != "" {
		req.Header.Set(idempotency.Header, r.key)
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return body, resp.StatusCode, err
}

func (c *Crowd) took(d time.Duration) {
	for {
		longest := c.slowest.Load()
		if int64(d) <= longest || c.slowest.CompareAndSwap(longest, int64(d)) {
			return
		}
	}
}
