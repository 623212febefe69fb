package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/runloop"
)

const (
	customers = 6
	events    = 4
	// answerPatience is longer than the shop takes for any request.
	answerPatience = 90 * time.Second
)

// crowd are customers who hold seats through all api processes, and confirm some, cancel others and let the rest
// expire. Each repeats a request, with its key, until it has a final answer.
type crowd struct {
	apis   []string
	http   *http.Client
	events []string
	held   atomic.Int64
	asked  atomic.Int64 // requests sent, repeats included
	stop   func()

	mu     sync.Mutex
	told   map[string]promise // by reservation
	faults []string
}

// promise is what a customer was told of a reservation.
type promise struct{ user, status string }

func newCrowd(apis []string) *crowd {
	return &crowd{
		apis: apis, told: map[string]promise{},
		http: &http.Client{Timeout: answerPatience, Transport: &http.Transport{MaxIdleConnsPerHost: clients}},
	}
}

// open makes events to hold seats of.
func (c *crowd) open(ctx context.Context, events int) error {
	for range events {
		answer, err := c.insist(ctx, 0, "owner", "/api/events", `{"name":"Stadium","seats":10000}`, http.StatusCreated)
		if err != nil {
			return err
		}
		c.events = append(c.events, idOf(answer.body))
	}
	return nil
}

// each calls do for so many customers at once.
func (c *crowd) each(customers int, do func(i int)) {
	var all sync.WaitGroup
	for i := range customers {
		all.Go(func() { do(i) })
	}
	all.Wait()
	c.http.CloseIdleConnections()
}

// gather sends customers until stop is called.
func gather(ctx context.Context, apis []string) (*crowd, error) {
	c := newCrowd(apis)
	if err := c.open(ctx, events); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	left := make(chan struct{})
	go func() {
		defer close(left)
		c.each(customers, func(i int) {
			for ctx.Err() == nil {
				c.visit(ctx, i)
			}
		})
	}()
	c.stop = func() {
		cancel()
		<-left
	}
	return c, nil
}

// visit holds a seat for a user of its own, whose reservations are then those of one key.
func (c *crowd) visit(ctx context.Context, i int) {
	user := "u-" + newKey()
	held, err := c.insist(ctx, i, user, "/api/reservations", holdOne(c.events[i%events]), http.StatusCreated)
	if err != nil {
		return
	}
	id := idOf(held.body)
	c.held.Add(1)
	c.promise(id, promise{user, ""})
	switch rand.IntN(4) {
	case 0:
		c.settle(ctx, i, user, id, "confirm", "confirmed")
	case 1:
		c.settle(ctx, i, user, id, "cancel", "cancelled")
	}
	_ = runloop.Sleep(ctx, time.Duration(rand.IntN(400))*time.Millisecond)
}

// settle ends a reservation, or learns that it has expired.
func (c *crowd) settle(ctx context.Context, i int, user, id, verb, status string) {
	answer, err := c.insist(ctx, i, user, "/api/reservations/"+id+"/"+verb, "{}", http.StatusOK, http.StatusConflict)
	if err == nil && answer.status == http.StatusOK {
		c.promise(id, promise{user, status})
	}
}

func (c *crowd) promise(id string, p promise) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told[id] = p
}

func (c *crowd) fault(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults = append(c.faults, fmt.Sprintf(format, args...))
}

type answer struct {
	status int
	body   []byte
}

// insist sends a request again, with the same key and through any api, until it is answered as wanted. Its error is
// that of ctx.
func (c *crowd) insist(ctx context.Context, try int, user, path, body string, wants ...int) (answer, error) {
	for key := newKey(); ; try++ {
		a, err := c.post(ctx, c.apis[try%len(c.apis)], key, user, path, body)
		if ctx.Err() != nil {
			return answer{}, ctx.Err()
		}
		if err == nil {
			if a.status == http.StatusInternalServerError {
				c.fault("%s is answered by 500 %s", path, a.body)
			}
			for _, want := range wants {
				if a.status == want && !bytes.Contains(a.body, []byte("IDEMPOTENCY_KEY_IN_USE")) {
					return a, nil
				}
			}
		}
		_ = runloop.Sleep(ctx, 50*time.Millisecond)
	}
}

func (c *crowd) post(ctx context.Context, api, key, user, path, body string) (answer, error) {
	c.asked.Add(1)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, api+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("X-Mock-User-Id", user)
	req.Header.Set(idempotency.Header, key)
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.http.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, text}, err
}

func newKey() string { return string(idempotency.NewKey()) }

func holdOne(event string) string { return `{"event_id":"` + event + `","quantity":1}` }

func idOf(body []byte) string {
	var v struct{ ID string }
	_ = json.Unmarshal(body, &v) // then the id is empty, and the next request is refused
	return v.ID
}

// wrongs are what must not be in the database once all is quiet.
var wrongs = []struct{ what, sql string }{
	{"reservations whose two messages did not take effect once", `select count(*) from reservations r
		full join reservation_states s on s.reservation_id = r.id
		where r.status is distinct from s.status or r.status = 'held' or s.messages <> 2`},
	{"seats of a reservation that does not have them", `select count(*) from seats s
		left join reservations r on r.id = s.reservation_id where s.state <> 'free' and
		(r.id is null or r.status <> 'confirmed' or s.state <> 'confirmed' or not s.number = any(r.seats))`},
	{"confirmed reservations that lack a seat", `select count(*) from reservations r where status = 'confirmed'
		and (select count(*) from seats s where s.reservation_id = r.id) <> cardinality(r.seats)`},
	{"keys with several reservations", `select count(*) from
		(select from reservations where user_id like 'u-%' group by user_id having count(*) > 1) twice`},
	{"dead letters of the outbox", `select count(*) from holdfast_outbox_dead`},
	{"messages left in the outbox", `select count(*) from holdfast_outbox`},
}

// audit compares what customers were told with the database, once that is quiet. They have left.
func (c *crowd) audit(ctx context.Context, database string) (faults []string, err error) {
	conn, err := pgx.Connect(ctx, database)
	if err != nil {
		return nil, err
	}
	defer conn.Close(ctx)
	faults = append(faults, c.faults...)
	for _, w := range wrongs {
		err := eventually(ctx, func(ctx context.Context) error {
			var n int
			if err := conn.QueryRow(ctx, w.sql).Scan(&n); err != nil {
				return err
			}
			if n > 0 {
				return fmt.Errorf("%d %s", n, w.what)
			}
			return nil
		})
		if err != nil {
			faults = append(faults, err.Error())
		}
	}
	rows, err := conn.Query(ctx, "select id::text, user_id, status from reservations")
	if err != nil {
		return nil, err
	}
	there := map[string]promise{}
	var id string
	var p promise
	if _, err = pgx.ForEachRow(rows, []any{&id, &p.user, &p.status}, func() error {
		there[id] = p
		return nil
	}); err != nil {
		return nil, err
	}
	if len(c.told) == 0 {
		return nil, errors.New("no customer held a seat")
	}
	for id, told := range c.told {
		if is := there[id]; is.user != told.user || told.status != "" && is.status != told.status {
			faults = append(faults, fmt.Sprintf("reservation %s was told to be %v and is %v", id, told, is))
		}
	}
	return faults, nil
}
