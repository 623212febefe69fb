// Package guides_test has the code of recipes.md and a part of testing.md, with its tests.
package guides_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/txretry"
	"github.com/holdfast-go/holdfast/txretry/pgtest"
)

// threeDays is how long the sender repeats webhooks.
const threeDays = 72 * time.Hour

// webhook stores each event once, in the outbox.
type webhook struct {
	secret  []byte
	manager *txretry.Manager
	store   *outboxpgx.Store // DedupRetention is longer than threeDays
}

func (h webhook) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
	if err != nil || !h.signed(body, r.Header.Get("X-Signature")) {
		http.Error(w, "bad signature", http.StatusUnauthorized)
		return
	}
	var event struct{ ID string }
	if err := json.Unmarshal(body, &event); err != nil || event.ID == "" {
		http.Error(w, "no event", http.StatusBadRequest)
		return
	}
	m, err := outbox.NewMessage("payment.reported", json.RawMessage(body))
	if err == nil {
		err = h.manager.Do(r.Context(), func(ctx context.Context, tx pgx.Tx) error {
			_, _, err := h.store.WriteOnce(ctx, tx, "payments:"+event.ID, m)
			return err
		})
	}
	if err != nil {
		http.Error(w, "try again", http.StatusServiceUnavailable)
		return
	}
	w.WriteHeader(http.StatusOK) // only now: the sender stops
}

func (h webhook) signed(body []byte, signature string) bool {
	mac := hmac.New(sha256.New, h.secret)
	mac.Write(body)
	sum, err := hex.DecodeString(signature)
	return err == nil && hmac.Equal(sum, mac.Sum(nil))
}

func TestWebhook_storesEachEventOnce(t *testing.T) {
	pool := pgtest.New(t)
	manager, err := txretry.New(pool, txretry.Config{})
	must(t, err)
	store, err := outboxpgx.New(pool, outboxpgx.Config{DedupRetention: threeDays + 24*time.Hour})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	h := webhook{[]byte("secret"), manager, store}
	const body = `{"id": "evt_1", "cents": 4200}`
	mac := hmac.New(sha256.New, h.secret)
	mac.Write([]byte(body))
	signature := hex.EncodeToString(mac.Sum(nil))
	for _, c := range []struct {
		body, signature string
		status          int
	}{
		{body, signature, http.StatusOK},
		{body, signature, http.StatusOK}, // the sender missed the answer
		{body, "00", http.StatusUnauthorized},
		{body + " ", signature, http.StatusUnauthorized},
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", strings.NewReader(c.body))
		r.Header.Set("X-Signature", c.signature)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != c.status {
			t.Errorf("status %d %s, want %d", w.Code, w.Body, c.status)
		}
	}
	var n int
	must(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM holdfast_outbox").Scan(&n))
	if n != 1 {
		t.Errorf("%d messages, want 1", n)
	}
}

// queue is a broker without a consumer of Holdfast.
type queue interface {
	Receive(ctx context.Context) (*inbox.Message, error) // an error when ctx ends
	Ack(m *inbox.Message) error
	Again(m *inbox.Message, after time.Duration) error   // stored, then acknowledged
	DeadLetter(m *inbox.Message, f driver.Failure) error // stored as a dead letter, then acknowledged
}

// consume works on one message at a time until ctx ends or the queue fails.
func consume(ctx context.Context, q queue, p inbox.Processor, retries inbox.RetryPolicy) error {
	for {
		m, err := q.Receive(ctx)
		if err != nil {
			return err
		}
		result := p.Process(ctx, []*inbox.Message{m})[0]
		if result == nil { // done, or a duplicate
			if err := q.Ack(m); err != nil {
				return err
			}
			continue
		}
		failure := driver.Classify(result)
		next := driver.Next(retries, m, failure, time.Now(), rand.Float64())
		if next.Counted {
			m.Attempt++
		}
		if next.Action == driver.ActionDead {
			err = q.DeadLetter(m, failure)
		} else {
			err = q.Again(m, next.Delay)
		}
		if err != nil {
			return err
		}
	}
}

// memory is a queue in memory. It returns errEmpty after the last message.
type memory struct {
	waiting     []*inbox.Message
	dead        []string
	delays      []time.Duration
	acked, done int
}

var errEmpty = errors.New("the queue is empty")

func (q *memory) Receive(context.Context) (*inbox.Message, error) {
	if len(q.waiting) == 0 {
		return nil, errEmpty
	}
	m := q.waiting[0]
	q.waiting = q.waiting[1:]
	return m, nil
}

func (q *memory) Ack(*inbox.Message) error { q.acked++; return nil }

func (q *memory) Again(m *inbox.Message, after time.Duration) error {
	q.waiting, q.delays = append(q.waiting, m), append(q.delays, after)
	return nil
}

func (q *memory) DeadLetter(_ *inbox.Message, f driver.Failure) error {
	q.dead = append(q.dead, f.Class)
	return nil
}

func TestConsume_settlesEveryResult(t *testing.T) {
	q, mux := &memory{}, inbox.NewMux()
	failures := map[string]error{
		"order.broken":   inbox.Unrecoverable(errors.New("no such order")),
		"order.unlucky":  errors.New("gateway timeout"),
		"order.too.soon": inbox.Postpone(errors.New("not paid"), time.Minute),
		"order.placed":   nil,
	}
	for name, failure := range failures {
		runs := 0
		must(t, inbox.Handle(mux, name, func(context.Context, struct{}) error {
			if runs++; failure != nil && (runs == 1 || name == "order.unlucky") {
				return failure
			}
			q.done++
			return nil
		}))
		id, err := uuid.NewV7()
		must(t, err)
		q.waiting = append(q.waiting, &inbox.Message{ID: id, Name: name, Body: []byte("{}"), Attempt: 1})
	}
	if err := consume(t.Context(), q, mux, inbox.RetryPolicy{MaxAttempts: 2}); !errors.Is(err, errEmpty) {
		t.Errorf("error %v, want the queue's", err)
	}
	if q.done != 2 || q.acked != 2 {
		t.Errorf("%d done, %d acknowledged, want 2 of each", q.done, q.acked)
	}
	if len(q.dead) != 2 || len(q.delays) != 2 {
		t.Errorf("dead letters of classes %v, retries after %v, want 2 of each", q.dead, q.delays)
	}
}

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// The example of testing.md.

type order struct {
	ID string `json:"id"`
}

func TestBill_retriesThenGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mux, broker, calls := inbox.NewMux(), inboxtest.NewBroker(), 0
		must(t, inbox.Handle(mux, "order.placed", func(context.Context, order) error {
			calls++
			return errors.New("the customer is unknown")
		}))
		consumer, err := inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "billing"}, mux, inbox.ConsumerConfig{})
		must(t, err)
		ctx, stop := context.WithCancel(t.Context())
		go consumer.Run(ctx)
		must(t, broker.Send(ctx, &inbox.Message{ID: uuid.Must(uuid.NewV7()), Name: "order.placed", Body: []byte("{}")}))
		time.Sleep(time.Minute) // of the bubble's clock
		dead, err := consumer.DeadLetters().List(ctx, inbox.Filter{})
		if err != nil || calls != 6 || len(dead) != 1 || dead[0].Error != "the customer is unknown" {
			t.Errorf("%d calls, dead letters %v, error %v", calls, dead, err)
		}
		stop()
		synctest.Wait()
	})
}
