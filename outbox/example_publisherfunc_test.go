package outbox_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
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

// maxCalls is the number of calls of the webhook at once.
const maxCalls = 8

// newWebhook returns a webhook that follows no redirect, because the client would repeat some of them as a GET without
// the body, and the answer would look like a success.
func newWebhook(url string) webhook {
	stay := func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.MaxIdleConnsPerHost = maxCalls // the default is 2, and closes the others after each call
	return webhook{client: &http.Client{Timeout: 4 * time.Second, Transport: transport, CheckRedirect: stay}, url: url}
}

func (w webhook) send(ctx context.Context, m outbox.Message) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url, bytes.NewReader(m.Body))
	if err != nil {
		return err
	}
	for _, name := range []string{"traceparent", "tracestate"} { // other names may be invalid in HTTP
		if value := m.Headers[name]; value != "" {
			request.Header.Set(name, value)
		}
	}
	request.Header.Set("Content-Type", m.ContentType)
	request.Header.Set("Webhook-Id", m.ID.String()) // the receiver recognises a copy by it
	request.Header.Set("Webhook-Name", m.Name)
	response, err := w.client.Do(request)
	if err != nil { // not reached: it costs the message no attempt, and the relay pauses
		return &driver.PublishError{Class: driver.Unavailable, Err: err}
	}
	defer response.Body.Close()
	_, _ = io.CopyN(io.Discard, response.Body, 64<<10) // so that the connection is used again
	err = errors.New(response.Status)
	switch code := response.StatusCode; code {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity:
		return &driver.PublishError{Class: driver.Permanent, Err: err}
	case http.StatusNotFound, http.StatusGone:
		return &driver.PublishError{Class: driver.Unroutable, Err: err}
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusTooManyRequests,
		http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout: // every message would fail
		return &driver.PublishError{Class: driver.Unavailable, Err: err}
	default:
		if code < 300 {
			return nil
		}
		return err // another attempt later
	}
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

	hook := newWebhook(endpoint.URL)
	relay, err := outbox.NewRelay(store, &outbox.PublisherFunc{Send: hook.send, Concurrency: maxCalls}, outbox.RelayConfig{})
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
	// QueueURL returns errNoQueue if there is no queue of the name.
	QueueURL(ctx context.Context, name string) (string, error)
	// SendBatch takes at most ten entries of 1 MiB together. It returns the rejected ones by id; an error means that it
	// took none. It is errTooLarge if they are too large.
	SendBatch(ctx context.Context, queueURL string, entries []entry) (rejected map[string]rejection, err error)
}

var (
	errNoQueue  = errors.New("no such queue")
	errTooLarge = errors.New("request too large")
)

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
		name := cmp.Or(m.Route.Exchange, q.fallback)
		byQueue[name] = append(byQueue[name], i)
	}
	for name, at := range byQueue {
		q.sendTo(ctx, name, msgs, at, errs)
	}
	return errs
}

// sendTo sends the messages with the indexes at, and sets their errors.
func (q cloudQueue) sendTo(ctx context.Context, name string, msgs []outbox.Message, at []int, errs []error) {
	entries := make([]entry, len(at))
	for n, i := range at {
		m := msgs[i]
		entries[n] = entry{
			ID: m.ID.String(), Body: string(m.Body), Attributes: m.Headers,
			// a FIFO queue keeps the order of a group, drops copies, and wants both
			GroupID: cmp.Or(m.Key, m.ID.String()), DedupID: m.ID.String(),
		}
	}
	url, err := q.client.QueueURL(ctx, name)
	var rejected map[string]rejection
	if err == nil {
		rejected, err = q.client.SendBatch(ctx, url, entries)
	}
	if half := len(at) / 2; errors.Is(err, errTooLarge) && half > 0 {
		q.sendTo(ctx, name, msgs, at[:half], errs)
		q.sendTo(ctx, name, msgs, at[half:], errs)
		return
	}
	class := driver.Unavailable // the service was not reached: no message costs an attempt
	switch {
	case errors.Is(err, errTooLarge):
		class = driver.Permanent
	case errors.Is(err, errNoQueue): // other queues work
		class = driver.Unroutable
	}
	for _, i := range at {
		r, isRejected := rejected[msgs[i].ID.String()]
		switch {
		case err != nil:
			errs[i] = &driver.PublishError{Class: class, Err: err}
		case isRejected && r.SenderFault:
			errs[i] = &driver.PublishError{Class: driver.Permanent, Err: errors.New(r.Code)}
		case isRejected:
			errs[i] = errors.New(r.Code)
		}
	}
}

// A cloud queue that takes ten messages a call.
func ExamplePublisherFunc_batches() {
	client := &fakeQueue{}
	store := withMessages("order.placed", "order.paid", "order.invalid")

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
	if name == "missing" {
		return "", errNoQueue
	}
	return "https://queues.example/" + name, nil
}

func (q *fakeQueue) SendBatch(_ context.Context, queueURL string, entries []entry) (map[string]rejection, error) {
	size := 0
	for _, e := range entries {
		size += len(e.Body)
	}
	if size > 1<<20 {
		return nil, errTooLarge
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.url = queueURL
	rejected := map[string]rejection{}
	for _, e := range entries {
		if strings.Contains(e.Body, "order.invalid") || e.GroupID == "" {
			rejected[e.ID] = rejection{Code: "InvalidParameterValue", SenderFault: true}
			continue
		}
		q.bodies = append(q.bodies, e.Body)
	}
	return rejected, nil
}
