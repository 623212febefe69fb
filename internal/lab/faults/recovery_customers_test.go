package faults_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
)

const (
	customerCount = 6
	shopEvents    = 4
	// answerPatience is longer than the shop takes for any request.
	answerPatience = 90 * time.Second
)

// customers hold seats through all api processes, confirm or cancel some, and let the others expire.
type customers struct {
	s      *reservationShop
	http   *http.Client
	events []string
	held   atomic.Int64
	// slowest is the longest time that an answer took since the last reset, in nanoseconds.
	slowest atomic.Int64
	stop    func()
}

// newCustomers opens some events and sends the customers.
func newCustomers(t testing.TB, s *reservationShop) *customers {
	t.Helper()
	transport := &http.Transport{MaxIdleConnsPerHost: 100}
	t.Cleanup(transport.CloseIdleConnections)
	c := &customers{s: s, http: &http.Client{Transport: transport, Timeout: answerPatience}}
	for range shopEvents {
		body, status, err := c.post(t.Context(), 0, newShopKey(), "/api/events", `{"name":"Stadium","seats":10000}`)
		if err != nil || status != http.StatusCreated {
			t.Fatalf("new event: %d %s %v", status, body, err)
		}
		c.events = append(c.events, idOf(body))
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var all sync.WaitGroup
	for i := range customerCount {
		all.Go(func() {
			for ctx.Err() == nil {
				c.visit(ctx, t, i)
			}
		})
	}
	c.stop = func() {
		cancel()
		all.Wait()
	}
	t.Cleanup(c.stop)
	return c
}

// visit holds a seat, and perhaps confirms or cancels it.
func (c *customers) visit(ctx context.Context, t testing.TB, i int) {
	t.Helper()
	body, err := c.insist(ctx, i, "/api/reservations", holdOne(c.events[i%len(c.events)]), http.StatusCreated)
	if err != nil {
		if ctx.Err() == nil {
			t.Error(err)
		}
		return
	}
	c.held.Add(1)
	switch rand.IntN(4) {
	case 0:
		_, err = c.insist(ctx, i, "/api/reservations/"+idOf(body)+"/confirm", "{}", http.StatusOK, http.StatusConflict)
	case 1:
		_, err = c.insist(ctx, i, "/api/reservations/"+idOf(body)+"/cancel", "{}", http.StatusOK, http.StatusConflict)
	}
	if err != nil && ctx.Err() == nil {
		t.Error(err)
	}
	pause(ctx, time.Duration(rand.IntN(400))*time.Millisecond)
}

// insist sends a request again, with the same key and through any api process, until it is answered as wanted.
func (c *customers) insist(ctx context.Context, try int, path, body string, wants ...int) ([]byte, error) {
	for key := newShopKey(); ; try++ {
		answer, status, err := c.post(ctx, try, key, path, body)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err == nil && status == http.StatusInternalServerError:
			return nil, fmt.Errorf("%s is answered by 500 %s", path, answer)
		case err == nil:
			for _, want := range wants {
				if status == want && !bytes.Contains(answer, []byte("IDEMPOTENCY_KEY_IN_USE")) {
					return answer, nil
				}
			}
		}
		pause(ctx, 50*time.Millisecond)
	}
}

// post sends a request to one of the api processes.
func (c *customers) post(ctx context.Context, api int, key, path, body string) ([]byte, int, error) {
	apis := c.s.named("api")
	url := apis[api%len(apis)].address()
	if url == "" {
		return nil, 0, fmt.Errorf("the api does not listen")
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, bytes.NewReader([]byte(body)))
	if err != nil {
		return nil, 0, err
	}
	req.Header.Set("X-Mock-User-Id", "customer")
	req.Header.Set("Idempotency-Key", key)
	req.Header.Set("Content-Type", "application/json")
	began := time.Now()
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	c.took(time.Since(began))
	return answer, resp.StatusCode, err
}

func (c *customers) took(d time.Duration) {
	for {
		longest := c.slowest.Load()
		if int64(d) <= longest || c.slowest.CompareAndSwap(longest, int64(d)) {
			return
		}
	}
}

func newShopKey() string { return string(idempotency.NewKey()) }

func holdOne(event string) string { return `{"event_id":"` + event + `","quantity":1}` }

func idOf(body []byte) string {
	var v struct{ ID string }
	_ = json.Unmarshal(body, &v) // then the id is empty, and the next request is refused
	return v.ID
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
