package sim

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// request is one request of a client. It may be sent several times.
type request struct {
	method, path, body string
	user, key          string // no key: a GET
}

// answer is the answer that a client got.
type answer struct {
	status int // 0: no answer
	code   string
	body   string
	after  time.Duration // Retry-After
}

// final reports whether repeating the request would not change the answer.
func (a answer) final() bool {
	switch a.status {
	case 0, http.StatusServiceUnavailable, http.StatusTooManyRequests:
		return false
	}
	return a.code != "IDEMPOTENCY_KEY_IN_USE"
}

// client buys seats like people do: it holds some, decides, retries without an answer, or gives up.
type client struct {
	world *world
	rand  *rand.Rand
	user  string
	mine  []string // reservations
}

func (w *world) newClient(number int) *client {
	name := userName(number)
	return &client{world: w, rand: w.dice.rand(name), user: name}
}

// owner is the number of the client that creates the events.
const owner = -1

// eventsPath is the path that creates events.
const eventsPath = "/api/events"

func userName(number int) string { return fmt.Sprintf("client-%d", number) }

// users returns the names of all users with a limit.
func (w *world) users() (names []string) {
	for i := owner; i < w.plan.clients; i++ {
		names = append(names, userName(i))
	}
	return names
}

// run sends the client's requests, spread over the time of faults.
func (c *client) run(events []string) {
	pause := 2 * float64(c.world.plan.faulty) / float64(c.world.plan.wishes)
	for range c.world.plan.wishes {
		time.Sleep(time.Duration(c.rand.Float64() * pause))
		c.wish(events[c.rand.IntN(len(events))])
	}
}

// wish sends one request, or a group of requests.
func (c *client) wish(event string) {
	switch n := c.rand.IntN(20); {
	case n < 8 || len(c.mine) == 0:
		c.hold(c.holdRequest(event))
	case n < 12:
		c.settle("confirm")
	case n < 15:
		c.settle("cancel")
	case n < 17:
		c.holdAtOnce(event)
	case n < 18:
		c.misuse(event)
	default:
		c.look(event)
	}
}

func (c *client) key() string {
	var b [16]byte
	for i := range b {
		b[i] = byte(c.rand.Uint32())
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return hex.EncodeToString(b[:])
}

func (c *client) holdRequest(event string) request {
	wish := `"quantity":` + strconv.Itoa(1+c.rand.IntN(2))
	if c.rand.IntN(2) == 0 {
		wish = `"seats":["A` + strconv.Itoa(1+c.rand.IntN(min(10, c.world.plan.seats))) + `"]`
	}
	return request{http.MethodPost, "/api/reservations", `{"event_id":"` + event + `",` + wish + `}`, c.user, c.key()}
}

func (c *client) hold(q request) {
	if a := c.ask(q, c.rand); a.status == http.StatusCreated {
		c.mine = append(c.mine, a.id())
	}
}

// id returns the id in an answer.
func (a answer) id() string {
	var shown struct{ ID string }
	_ = json.Unmarshal([]byte(a.body), &shown) // the checks find an answer without an id
	return shown.ID
}

func (c *client) settle(how string) {
	id := c.mine[c.rand.IntN(len(c.mine))]
	c.ask(request{http.MethodPost, "/api/reservations/" + id + "/" + how, "", c.user, c.key()}, c.rand)
}

// holdAtOnce sends the same request twice in parallel.
func (c *client) holdAtOnce(event string) {
	q := c.holdRequest(event)
	var both sync.WaitGroup
	var answers [2]answer
	for i := range answers {
		r := rand.New(rand.NewPCG(c.rand.Uint64(), uint64(i)))
		both.Go(func() { answers[i] = c.ask(q, r) })
	}
	both.Wait()
	for _, a := range answers {
		if a.status == http.StatusCreated {
			c.mine = append(c.mine, a.id())
			return
		}
	}
}

// misuse sends a different request with a key that already has its answer.
func (c *client) misuse(event string) {
	q := c.holdRequest(event)
	if a := c.ask(q, c.rand); a.status == 0 {
		return
	} else if a.status == http.StatusCreated {
		c.mine = append(c.mine, a.id())
	}
	q.body = `{"event_id":"` + event + `","quantity":3}`
	if a := c.again(q, c.rand); a.status != 0 && a.code != "IDEMPOTENCY_KEY_REUSED" {
		c.world.found("another request with the key %s is answered %d %s", q.key, a.status, a.body)
	}
}

func (c *client) look(event string) {
	path := "/api/events/" + event
	switch c.rand.IntN(3) {
	case 0:
		path += "/stats"
	case 1:
		path = "/api/reservations/" + c.mine[c.rand.IntN(len(c.mine))]
	}
	if a := c.again(request{method: http.MethodGet, path: path}, c.rand); a.status != 0 && a.status != http.StatusOK {
		c.world.found("GET %s is answered %d %s", path, a.status, a.body)
	}
}

// ask repeats a request until it has the final answer, and compares that with other answers for the same key. It
// returns the zero answer if the client gives up.
func (c *client) ask(q request, r *rand.Rand) answer {
	c.world.history.sent(q)
	a := c.again(q, r)
	if a.status == 0 {
		return a
	}
	if first := c.world.history.heard(q, a); first.status != a.status || first.body != a.body {
		c.world.found("key %s is answered %d %s and %d %s", q.key, first.status, first.body, a.status, a.body)
	}
	if !fits(q, a) {
		c.world.found("%s %s %s is answered %d %s", q.method, q.path, q.body, a.status, a.body)
	}
	return a
}

// fits reports whether the request may get this answer.
func fits(q request, a answer) bool {
	switch {
	case q.path == eventsPath || q.path == "/api/reservations":
		return a.status == http.StatusCreated || a.code == "SEATS_UNAVAILABLE"
	default:
		return a.status == http.StatusOK || a.code == "RESERVATION_NOT_HELD" || a.code == "RESERVATION_EXPIRED"
	}
}

// again repeats a request until its answer is final. While faults happen, a client may give up.
func (c *client) again(q request, r *rand.Rand) answer {
	for {
		a := c.world.send(q, r)
		c.world.history.denies(a)
		if a.final() {
			return a
		}
		if c.world.isFaulty() && r.IntN(20) == 0 {
			return answer{}
		}
		if c.world.now() > c.world.plan.answered() {
			c.world.found("%s %s is still answered %d %s", q.method, q.path, a.status, a.body)
			return answer{}
		}
		time.Sleep(max(a.after, time.Duration(r.Float64()*float64(2*time.Second))) + time.Duration(r.IntN(1e6)))
	}
}

// patience is how long a client waits for an answer.
const patience = 12 * time.Second

// send lets one of the processes serve the request, and returns the answer that arrives.
func (w *world) send(q request, r *rand.Rand) answer {
	choice := r.IntN(processes)
	p := w.api(choice)
	if p == nil {
		return answer{}
	}
	ctx, hangUp := context.WithTimeout(p.alive, patience)
	defer hangUp()
	arrives := make(chan answer, 1)
	w.servants.run(func() {
		defer p.requests.Done()
		arrives <- w.serve(ctx, q)
	})
	select {
	case a := <-arrives:
		if p.dead.Load() {
			return answer{}
		}
		return a
	case <-ctx.Done():
		return answer{}
	}
}

// serve calls the shop's handler.
func (w *world) serve(ctx context.Context, q request) answer {
	r := (&http.Request{
		Method: q.method, URL: &url.URL{Path: q.path}, Host: "shop", Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{}, Body: io.NopCloser(strings.NewReader(q.body)), ContentLength: int64(len(q.body)),
	}).WithContext(q.visit(ctx))
	if q.key != "" {
		r.Header["Idempotency-Key"] = []string{q.key}
		r.Header["X-Mock-User-Id"] = []string{q.user}
		if q.body != "" {
			r.Header["Content-Type"] = []string{"application/json"}
		}
	}
	rec := &recorder{header: http.Header{}}
	w.shop.API().ServeHTTP(rec, r)
	return rec.answer()
}

// recorder is a ResponseWriter.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
}

func (r *recorder) Write(b []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	return r.body.Write(b)
}

func (r *recorder) answer() answer {
	a := answer{status: max(r.status, http.StatusOK), body: r.body.String()}
	if seconds, err := strconv.Atoi(r.header.Get("Retry-After")); err == nil {
		a.after = time.Duration(seconds) * time.Second
	}
	if a.status >= 400 {
		var problem struct{ Code string }
		_ = json.Unmarshal(r.body.Bytes(), &problem)
		a.code = problem.Code
	}
	return a
}

// servants are reusable goroutines. The handlers' stacks are deep, and growing a new stack for every request
// takes a tenth of the time.
type servants struct {
	mu    sync.Mutex
	idle  []chan func()
	ended bool
}

func (s *servants) run(job func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if last := len(s.idle) - 1; last >= 0 {
		s.idle[last] <- job
		s.idle = s.idle[:last]
		return
	}
	jobs := make(chan func(), 1)
	jobs <- job
	go s.serve(jobs)
}

func (s *servants) serve(jobs chan func()) {
	for job := range jobs {
		job()
		if !s.rest(jobs) {
			return
		}
	}
}

// rest marks a servant as idle. It returns false if there will be no more work.
func (s *servants) rest(jobs chan func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = append(s.idle, jobs)
	return !s.ended
}

// end makes the servants end when they are idle.
func (s *servants) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for _, jobs := range s.idle {
		close(jobs)
	}
}
