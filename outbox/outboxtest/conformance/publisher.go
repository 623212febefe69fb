package conformance

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// PublisherBackend creates the publishers under test.
type PublisherBackend struct {
	// Bubble is true if a publisher can run in a testing/synctest bubble.
	Bubble bool
	// Open returns a new publisher for each case, with access to the messages that its broker received.
	Open func(t *testing.T) PublisherCase
}

// PublisherCase is one publisher with the broker behind it.
type PublisherCase struct {
	Publisher driver.Publisher
	// Received returns the messages that have arrived until now. The suite compares id, name, body, content type and
	// the headers of Message.
	Received func(ctx context.Context) ([]driver.Message, error)
	// Break disconnects the broker, Fix reconnects it. Nil if that is not possible: then the cases of an outage are
	// left out.
	Break, Fix func()
	// Unroutable is a message for which the broker has no destination. Its zero value leaves the case out.
	Unroutable driver.Message
}

// TestPublisher checks the contract of driver.Publisher.
func TestPublisher(t *testing.T, b PublisherBackend) {
	for name, fn := range map[string]func(*testing.T, PublisherCase){
		"delivers a message whole":             deliversWhole,
		"delivers many in flight":              deliversMany,
		"is safe for concurrent use":           publishesConcurrently,
		"answers when nobody waits":            answersWhenNobodyWaits,
		"outlives the context of a message":    outlivesContext,
		"distinguishes unroutable messages":    tellsUnroutable,
		"is unavailable in an outage, resumes": resumesAfterOutage,
	} {
		each(t, b.Bubble, name, func(t *testing.T) { fn(t, b.Open(t)) })
	}
}

// ledger counts the calls of done for each message.
type ledger struct {
	mu    sync.Mutex
	calls map[uuid.UUID]int
	errs  map[uuid.UUID]error
	open  sync.WaitGroup
}

func newLedger() *ledger {
	return &ledger{calls: map[uuid.UUID]int{}, errs: map[uuid.UUID]error{}}
}

func (l *ledger) publish(ctx context.Context, p driver.Publisher, m driver.Message) {
	l.open.Add(1)
	var first atomic.Bool
	p.Publish(ctx, m, func(err error) {
		l.mu.Lock()
		l.calls[m.ID]++
		l.errs[m.ID] = err
		l.mu.Unlock()
		if first.CompareAndSwap(false, true) {
			l.open.Done()
		}
	})
}

// wait returns the error of each message after done was called for all.
func (l *ledger) wait(t *testing.T) map[uuid.UUID]error {
	t.Helper()
	all := make(chan struct{})
	go func() { l.open.Wait(); close(all) }()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-all:
	case <-timer.C:
		t.Fatalf("some messages were not answered within %v", patience)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, n := range l.calls {
		if n != 1 {
			t.Errorf("done was called %d times for %s", n, id)
		}
	}
	return maps.Clone(l.errs)
}

func (l *ledger) mustAllConfirm(t *testing.T) {
	t.Helper()
	for id, err := range l.wait(t) {
		if err != nil {
			t.Fatalf("%s: %v", id, err)
		}
	}
}

func newMessage(t *testing.T, body string) driver.Message {
	t.Helper()
	return NewMessage(t, "order.placed", body)
}

// NewMessage returns a message in the form in which a relay passes it to a Publisher, with v as its JSON body. The
// name may be invalid for writers.
func NewMessage(t testing.TB, name string, v any) driver.Message {
	t.Helper()
	m, err := outbox.NewMessage(name, v)
	must(t, err)
	return driver.Message{ID: m.ID, Name: m.Name, Body: m.Body, ContentType: m.ContentType}
}

// arrived waits until n messages have arrived and returns them by id.
func arrived(t *testing.T, c PublisherCase, n int) map[uuid.UUID]driver.Message {
	t.Helper()
	byID := map[uuid.UUID]driver.Message{}
	eventually(t, func() string {
		got, err := c.Received(t.Context())
		if err != nil {
			return err.Error()
		}
		clear(byID)
		for _, m := range got {
			byID[m.ID] = m
		}
		if len(byID) < n {
			return fmt.Sprintf("%d of %d messages have arrived", len(byID), n)
		}
		return ""
	})
	return byID
}

func deliversWhole(t *testing.T, c PublisherCase) {
	m := newMessage(t, "äöü \"quoted\" \n")
	m.Headers = map[string]string{"tenant": "t-1", "note": "with ünïcode, and a comma"}
	m.ContentType = "application/vnd.shop+json"
	m.Key = "k"
	l := newLedger()
	l.publish(t.Context(), c.Publisher, m)
	l.mustAllConfirm(t)
	got := arrived(t, c, 1)[m.ID]
	if got.Name != m.Name || string(got.Body) != string(m.Body) || got.ContentType != m.ContentType {
		t.Errorf("arrived as %+v, was %+v", got, m)
	}
	for name, value := range m.Headers {
		if got.Headers[name] != value {
			t.Errorf("header %s arrived as %q, was %q", name, got.Headers[name], value)
		}
	}
}

func deliversMany(t *testing.T, c PublisherCase) {
	const n = 500
	l := newLedger()
	for i := range n {
		l.publish(t.Context(), c.Publisher, newMessage(t, strconv.Itoa(i)))
	}
	l.mustAllConfirm(t)
	arrived(t, c, n)
}

func publishesConcurrently(t *testing.T, c PublisherCase) {
	const goroutines, each = 8, 50
	l := newLedger()
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range each {
				l.publish(t.Context(), c.Publisher, newMessage(t, fmt.Sprint(g, i)))
			}
		})
	}
	wg.Wait()
	l.mustAllConfirm(t)
	arrived(t, c, goroutines*each)
}

func answersWhenNobodyWaits(t *testing.T, c PublisherCase) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	l := newLedger()
	m := newMessage(t, "late")
	l.publish(ctx, c.Publisher, m)
	if err := l.wait(t)[m.ID]; err != nil && driver.ClassOf(err) != driver.Unavailable {
		t.Errorf("answered %v, want a confirm or class unavailable", err)
	}
}

func outlivesContext(t *testing.T, c PublisherCase) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	l := newLedger()
	l.publish(ctx, c.Publisher, newMessage(t, "first"))
	l.mustAllConfirm(t)
	cancel()
	l.publish(t.Context(), c.Publisher, newMessage(t, "second"))
	l.mustAllConfirm(t)
	arrived(t, c, 2)
}

func tellsUnroutable(t *testing.T, c PublisherCase) {
	if c.Unroutable.Name == "" {
		t.Skip("this backend has no unroutable messages")
	}
	good := newMessage(t, "good")
	l := newLedger()
	l.publish(t.Context(), c.Publisher, c.Unroutable)
	l.publish(t.Context(), c.Publisher, good)
	errs := l.wait(t)
	if err := errs[c.Unroutable.ID]; err == nil || driver.ClassOf(err) != driver.Unroutable {
		t.Errorf("the unroutable message was answered with %v", err)
	}
	if errs[good.ID] != nil {
		t.Errorf("the valid message was answered with %v", errs[good.ID])
	}
}

func resumesAfterOutage(t *testing.T, c PublisherCase) {
	if c.Break == nil || c.Fix == nil {
		t.Skip("this backend cannot be cut off")
	}
	l := newLedger()
	l.publish(t.Context(), c.Publisher, newMessage(t, "before"))
	l.mustAllConfirm(t)

	c.Break()
	during := newMessage(t, "during")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // timing: must pass
	l.publish(ctx, c.Publisher, during)
	err := l.wait(t)[during.ID]
	cancel()
	if err == nil || driver.ClassOf(err) != driver.Unavailable {
		t.Errorf("in the outage the answer was %v, want class unavailable", err)
	}

	c.Fix()
	eventually(t, func() string {
		again := newLedger()
		m := newMessage(t, "after")
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // timing: tries again
		defer cancel()
		again.publish(ctx, c.Publisher, m)
		if err := again.wait(t)[m.ID]; err != nil {
			return err.Error()
		}
		return ""
	})
}
