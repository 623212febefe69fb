// Package harness drives the ticket shop of examples/reservation while a command injects faults. A Crowd buys over HTTP and
// records all answers, triggers record every change in the database, and a Ledger records every message that reaches the
// broker. A Watch measures recoveries and compares the three with package audit.
package harness

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/lab/harness/audit"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	clientCount = 8
	largeEvents = 3
	largeSeats  = 10000
	// smallSeats is the number of seats of a contested event. Every client creates such an event now and then.
	smallSeats = 30
	// answerPatience is how long a client repeats a request. It is longer than any fault and its recovery.
	answerPatience = 2 * time.Minute
)

// Crowd is the clients of the shop, with all their answers.
type Crowd struct {
	apis func() []string
	http *http.Client
	rngs []*rand.Rand // one for each client

	twins   sync.WaitGroup // second requests that are in flight
	holds   atomic.Int64   // confirmed to clients
	sent    atomic.Int64   // requests
	slowest atomic.Int64   // answer since the last reset, in nanoseconds

	mu      sync.Mutex
	answers []audit.Answer
	large   []string
	small   []string
	unmet   []string // requests without a final answer in time
	stop    func()   // nil while the clients are away
}

// newCrowd creates the large events. apis returns the addresses of the processes that clients reach, "" for one that does
// not listen; it is called from many goroutines. The seed chooses the actions of the clients. The caller must Close the
// crowd.
func newCrowd(ctx context.Context, apis func() []string, seed uint64) (*Crowd, error) {
	c := &Crowd{apis: apis, http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}, Timeout: answerTimeout}}
	for i := range uint64(clientCount) {
		c.rngs = append(c.rngs, rand.New(rand.NewPCG(seed, 100+i)))
	}
	for i := range largeEvents {
		event := c.newEvent(ctx, 0, largeSeats)
		if event == "" {
			c.Close()
			return nil, fmt.Errorf("event %d was not made", i)
		}
		c.large = append(c.large, event)
	}
	c.small = append(c.small, c.newEvent(ctx, 0, smallSeats))
	return c, nil
}

// Close drops the connections of the clients. Call Leave first.
func (c *Crowd) Close() { c.http.CloseIdleConnections() }

// Come starts the clients; Leave stops them.
func (c *Crowd) Come(ctx context.Context) {
	stopped := make(chan struct{})
	var all sync.WaitGroup
	for i := range clientCount {
		all.Go(func() {
			for ctx.Err() == nil {
				select {
				case <-stopped:
					return
				default:
					c.visit(ctx, i)
				}
			}
		})
	}
	c.stop = func() {
		close(stopped)
		all.Wait()
		c.twins.Wait()
	}
}

// Leave stops the clients and returns when each has its pending answers.
func (c *Crowd) Leave() {
	if c.stop != nil {
		c.stop()
	}
	c.stop = nil
}

// visit is one round of a client.
func (c *Crowd) visit(ctx context.Context, client int) {
	rng := c.rngs[client]
	_ = runloop.Sleep(ctx, time.Duration(rng.IntN(250))*time.Millisecond)
	if rng.IntN(40) == 0 {
		if event := c.newEvent(ctx, client, smallSeats); event != "" {
			c.mu.Lock()
			c.small = append(c.small, event)
			c.mu.Unlock()
		}
	}
	wish := c.drawHold(rng)
	held := c.insist(ctx, client, wish, rng)
	if held.Status != http.StatusCreated {
		return
	}
	c.holds.Add(1)
	if rng.IntN(3) == 0 {
		c.read(ctx, client, held)
	}
	c.settle(ctx, client, held, rng)
	if rng.IntN(3) == 0 {
		c.read(ctx, client, held)
	}
	if rng.IntN(4) == 0 { // the answer must still be the same
		c.insist(ctx, client, wish, rng)
	}
}

// drawHold requests any seats, or certain seats that others want, too.
func (c *Crowd) drawHold(rng *rand.Rand) request {
	c.mu.Lock()
	large, newest := c.large[rng.IntN(len(c.large))], c.small[max(0, len(c.small)-1-rng.IntN(2))]
	c.mu.Unlock()
	wish := fmt.Sprintf(`"quantity":%d`, 1+rng.IntN(3))
	event := newest
	switch rng.IntN(4) {
	case 0, 1:
		event = large
	case 2:
		first := 1 + rng.IntN(smallSeats-1)
		wish = fmt.Sprintf(`"seats":[%q,%q]`, audit.SeatName(first), audit.SeatName(first+1))
	}
	return holdRequest(newKey(), event, wish)
}

// settle confirms or cancels a hold, or both at once, or lets it expire.
func (c *Crowd) settle(ctx context.Context, client int, held audit.Answer, rng *rand.Rand) {
	user := held.Key
	ask := func(op string) { c.insist(ctx, client, settleRequest(op, newKey(), user, held), nil) }
	switch rng.IntN(8) {
	case 0, 1, 2:
		c.insist(ctx, client, settleRequest(audit.OpConfirm, newKey(), user, held), rng)
	case 3, 4:
		c.insist(ctx, client, settleRequest(audit.OpCancel, newKey(), user, held), rng)
	case 5:
		var both sync.WaitGroup
		both.Go(func() { ask(audit.OpConfirm) })
		both.Go(func() { ask(audit.OpCancel) })
		both.Wait()
	}
}

// Holds counts the reservations that were confirmed to clients.
func (c *Crowd) Holds() int64 { return c.holds.Load() }

// Requests counts the sent requests, including repeats.
func (c *Crowd) Requests() int64 { return c.sent.Load() }

// Slowest is the longest time for an answer since ForgetSlowest.
func (c *Crowd) Slowest() time.Duration { return time.Duration(c.slowest.Load()) }

// ForgetSlowest resets Slowest.
func (c *Crowd) ForgetSlowest() { c.slowest.Store(0) }

// Told returns a copy of all answers, and the requests without a final answer.
func (c *Crowd) Told() (answers []audit.Answer, unmet []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]audit.Answer(nil), c.answers...), append([]string(nil), c.unmet...)
}

// answerTimeout is longer than the shop takes for any request.
const answerTimeout = 90 * time.Second

// request is a request that may be repeated.
type request struct {
	op, key, user   string
	method          string // "" is POST
	path, body      string
	event, reserved string // the event and the reservation that it concerns
}

func newKey() string { return string(idempotency.NewKey()) }

// holdRequest holds seats for the user named like the key.
func holdRequest(key, event, wish string) request {
	return request{op: audit.OpHold, key: key, user: key, path: "/api/reservations", body: `{"event_id":"` + event + `",` + wish + `}`, event: event}
}

func settleRequest(op, key, user string, held audit.Answer) request {
	return request{op: op, key: key, user: user, path: "/api/reservations/" + held.Reservation + "/" + op, body: "{}", event: held.Event, reserved: held.Reservation}
}

// newEvent returns the id of a new event, "" if it could not be created.
func (c *Crowd) newEvent(ctx context.Context, client, seats int) string {
	key := newKey()
	body := fmt.Sprintf(`{"name":"Stadium","seats":%d}`, seats)
	return c.insist(ctx, client, request{op: audit.OpEvent, key: key, user: key, path: "/api/events", body: body}, nil).Event
}

// read reads a reservation, once.
func (c *Crowd) read(ctx context.Context, client int, held audit.Answer) {
	r := request{op: audit.OpRead, user: held.Key, method: http.MethodGet, path: "/api/reservations/" + held.Reservation, event: held.Event, reserved: held.Reservation}
	c.send(ctx, client, client, r)
}

// insist repeats a request, through any api, until it gets its final answer. With an rng it sometimes sends the request
// twice at once. The second one goes through another api, and nobody waits for its answer, which may never come.
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

// send sends a request to one of the apis, once, and records the answer.
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
