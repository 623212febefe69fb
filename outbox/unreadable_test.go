package outbox_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

// garbled is a Source whose messages with the body "0" could not be decoded.
type garbled struct{ driver.Source }

func (s garbled) Claim(ctx context.Context, req driver.Claim) (driver.Batch, error) {
	b, err := s.Source.Claim(ctx, req)
	b.Unreadable = map[int]error{}
	for i, m := range b.Messages {
		if string(m.Body) == "0" {
			b.Unreadable[i] = errors.New("headers of another kind")
		}
	}
	return b, err
}

// What could not be decoded is a dead letter, its key goes on, and no publisher sees it.
func TestUnreadableMessages(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.over(garbled{b.store}, outbox.RelayConfig{})
		for n := range 3 {
			b.write(message("k", n), message("", n))
		}
		if report := b.drain(outbox.Bounds{}); report.Published != 4 || report.Dead != 2 {
			b.Errorf("report %+v", report)
		}
		for _, m := range b.publisher.Received() {
			if string(m.Body) == "0" {
				b.Error("published what could not be read")
			}
		}
		for _, d := range b.dead() {
			if d.Class != string(driver.Permanent) || !strings.Contains(d.Error, "headers of another kind") {
				b.Errorf("dead letter %+v", d)
			}
		}
	})
}

// It says nothing about a transport that is paused, either.
func TestUnreadableMessagesEndNoPause(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.over(garbled{b.store}, outbox.RelayConfig{})
		b.publisher.Respond(func(driver.Message) error { return failure(driver.Unavailable) })
		b.write(message("k", 1))
		defer b.start()()
		time.Sleep(time.Minute)
		b.write(message("", 0))
		time.Sleep(time.Minute)
		if len(b.dead()) != 1 {
			b.Fatalf("dead letters %+v", b.dead())
		}
		if b.relay.Ready(b.Context()) == nil {
			b.Error("a message that was not sent has ended the pause")
		}
	})
}

// foreignIDs is a Source of messages that another program gave ids or names of its own.
type foreignIDs struct{ driver.Source }

func (s foreignIDs) Claim(ctx context.Context, req driver.Claim) (driver.Batch, error) {
	b, err := s.Source.Claim(ctx, req)
	for i := range b.Messages {
		switch string(b.Messages[i].Body) {
		case "0":
			b.Messages[i].ID = uuid.MustParse("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")
		case "1":
			b.Messages[i].Name = `App\OrderPlaced`
		}
	}
	return b, err
}

func TestForeignMessagesAreNotPublished(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		s := &settled{Source: foreignIDs{b.store}}
		b.over(s, outbox.RelayConfig{})
		b.write(message("", 0), message("", 1), message("", 2))
		b.drain(outbox.Bounds{Limit: 3})
		b.wantReceived("2")
		for body, want := range map[string]string{"0": "version 7", "1": "lower-case words"} {
			if f := s.of(body); f.Class != driver.Permanent || !strings.Contains(f.Err, want) {
				b.Errorf("message %s: %+v", body, f)
			}
		}
	})
}
