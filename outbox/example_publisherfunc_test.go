package outbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
)

// webhook posts messages to an endpoint.
type webhook struct {
	client *http.Client
	url    string
}

func (w webhook) send(ctx context.Context, m outbox.Message) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url, bytes.NewReader(m.Body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", m.ContentType)
	request.Header.Set("Webhook-Id", m.ID.String()) // the receiver recognises a copy by it
	request.Header.Set("Webhook-Name", m.Name)
	for name, value := range m.Headers {
		request.Header.Set(name, value)
	}
	response, err := w.client.Do(request)
	if err != nil { // not reached: it costs the message no attempt, and the relay pauses
		return &driver.PublishError{Class: driver.Unavailable, Err: err}
	}
	defer response.Body.Close()
	err = errors.New(response.Status)
	switch code := response.StatusCode; {
	case code < 300:
		return nil
	case code == http.StatusTooManyRequests || code == http.StatusServiceUnavailable:
		return &driver.PublishError{Class: driver.Unavailable, Err: err}
	case code == http.StatusNotFound:
		return &driver.PublishError{Class: driver.Unroutable, Err: err}
	case code < 500:
		return &driver.PublishError{Class: driver.Permanent, Err: err}
	}
	return err // another attempt later
}

// An HTTP endpoint. Its answers say which messages the relay sends again.
func ExamplePublisherFunc() {
	endpoint := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Webhook-Name") == "order.cancelled" {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	}))
	defer endpoint.Close()
	store := withMessages("order.placed", "order.cancelled")

	hook := webhook{client: &http.Client{Timeout: 4 * time.Second}, url: endpoint.URL}
	relay, err := outbox.NewRelay(store, &outbox.PublisherFunc{Send: hook.send, Concurrency: 8}, outbox.RelayConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	report, err := relay.Drain(context.Background(), outbox.Bounds{})
	fmt.Println(report.Published, "published,", report.Dead, "dead", err)
	letters, err := store.DeadLetters().List(context.Background(), outbox.Filter{})
	fmt.Println(letters[0].Message.Name, letters[0].Error, err)
	// Output:
	// 1 published, 1 dead <nil>
	// order.cancelled outbox: publish: permanent: 422 Unprocessable Entity <nil>
}

// queueAPI is the part of a cloud queue's client that the outbox needs.
type queueAPI interface {
	QueueURL(ctx context.Context, name string) (string, error)
	// SendBatch takes at most ten entries. It returns the rejected ones by id; an error means that it took none.
	SendBatch(ctx context.Context, queueURL string, entries []entry) (rejected map[string]rejection, err error)
}

type entry struct {
	ID, Body         string
	GroupID, DedupID string
	Attributes       map[string]string
}

type rejection struct {
	Code        string
	SenderFault bool // it would be rejected again
}

// cloudQueue publishes to the queue that Message.Route.Exchange names.
type cloudQueue struct {
	client   queueAPI
	fallback string // of messages without a route
}

func (q cloudQueue) sendBatch(ctx context.Context, msgs []outbox.Message) []error {
	errs := make([]error, len(msgs))
	byQueue := map[string][]int{}
	for i, m := range msgs {
		name := m.Route.Exchange
		if name == "" {
			name = q.fallback
		}
		byQueue[name] = append(byQueue[name], i)
	}
	for name, at := range byQueue {
		rejected, err := q.sendTo(ctx, name, msgs, at)
		for _, i := range at {
			r, isRejected := rejected[msgs[i].ID.String()]
			switch {
			case err != nil: // the service was not reached: no message costs an attempt
				errs[i] = &driver.PublishError{Class: driver.Unavailable, Err: err}
			case isRejected && r.SenderFault:
				errs[i] = &driver.PublishError{Class: driver.Permanent, Err: errors.New(r.Code)}
			case isRejected:
				errs[i] = errors.New(r.Code)
			}
		}
	}
	return errs
}

func (q cloudQueue) sendTo(ctx context.Context, name string, msgs []outbox.Message, at []int) (map[string]rejection, error) {
	url, err := q.client.QueueURL(ctx, name)
	if err != nil {
		return nil, err
	}
	entries := make([]entry, len(at))
	for n, i := range at {
		m := msgs[i]
		entries[n] = entry{
			ID: m.ID.String(), Body: string(m.Body), Attributes: m.Headers,
			GroupID: m.Key, DedupID: m.ID.String(), // a FIFO queue keeps the order of a group and drops copies
		}
	}
	return q.client.SendBatch(ctx, url, entries)
}

// A cloud queue that takes ten messages a call.
func ExamplePublisherFunc_batches() {
	client := &fakeQueue{}
	store := withMessages("order.placed", "order.paid", "order.too-large")

	queue := cloudQueue{client: client, fallback: "orders.fifo"}
	relay, err := outbox.NewRelay(store, &outbox.PublisherFunc{SendBatch: queue.sendBatch, BatchSize: 10}, outbox.RelayConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	report, err := relay.Drain(context.Background(), outbox.Bounds{})
	fmt.Println(report.Published, "published,", report.Dead, "dead", err)
	slices.Sort(client.bodies)
	fmt.Println(client.url, client.bodies)
	// Output:
	// 2 published, 1 dead <nil>
	// https://queues.example/orders.fifo ["order.paid" "order.placed"]
}

// withMessages returns a store with a message of each name, which has the name as its body.
func withMessages(names ...string) *outboxtest.Store {
	store, manager := outboxtest.New(), txretrytest.New(txretrytest.Config{})
	err := manager.Do(context.Background(), func(ctx context.Context, tx pgx.Tx) error {
		for _, name := range names {
			m, err := outbox.NewMessage(name, name)
			if err == nil {
				err = store.Write(ctx, tx, m)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		fmt.Println(err)
	}
	return store
}

// fakeQueue is a queueAPI in memory.
type fakeQueue struct {
	mu     sync.Mutex
	url    string
	bodies []string
}

func (q *fakeQueue) QueueURL(_ context.Context, name string) (string, error) {
	return "https://queues.example/" + name, nil
}

func (q *fakeQueue) SendBatch(_ context.Context, queueURL string, entries []entry) (map[string]rejection, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.url = queueURL
	rejected := map[string]rejection{}
	for _, e := range entries {
		if strings.Contains(e.Body, "too-large") {
			rejected[e.ID] = rejection{Code: "InvalidParameterValue", SenderFault: true}
			continue
		}
		q.bodies = append(q.bodies, e.Body)
	}
	return rejected, nil
}
