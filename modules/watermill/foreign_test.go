package watermillbridge_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/holdfast-go/holdfast/inbox"
	watermillbridge "github.com/holdfast-go/holdfast/modules/watermill"
	"github.com/holdfast-go/holdfast/outbox"
)

// travelled publishes a message through an outbox, and returns it as a subscriber gets it.
func travelled(t *testing.T, m *message.Message) *message.Message {
	t.Helper()
	out := sent(t, "order.placed", m)
	if _, err := outbox.Prepare(t.Context(), []outbox.Message{out}, 0); err != nil {
		t.Errorf("an outbox refuses it: %v", err)
	}
	s, messages, process := subscribed(t)
	done := make(chan error, 1)
	go func() {
		done <- process(t.Context(), &inbox.Message{ID: out.ID, Name: out.Name, Body: out.Body, ContentType: out.ContentType, Key: out.Key, Headers: out.Headers})
	}()
	back := <-messages
	back.Ack()
	if err := errors.Join(<-done, s.Close()); err != nil {
		t.Error(err)
	}
	return back
}

// foreign are texts that a header may not have, and some that it may.
var foreign = map[string]string{
	"lines": "first\nsecond\r\n", "tab": "a\tb", "NUL": "a\x00b", "C1": "a\u0085b", "no UTF-8": "a\xff\xfe", "quotes": `"a\b"` + "\n",
	"direction": "a\u202eb\n", "percent": "100 %\n", "non-ASCII": "grüße\n", "blank": " ", "empty": "",
}

// An outbox accepts any texts in metadata, UUID, key and content type, and the message arrives unchanged.
func TestForeign_textsArriveAsTheyWere(t *testing.T) {
	t.Parallel()
	for what, text := range foreign {
		m := message.NewMessage(text, []byte("{"))
		m.Metadata = message.Metadata{"value": text, text: "name", "holdfast-attempt": "reserved", "plain": "as it is"}
		m.Metadata[watermillbridge.MetadataKey], m.Metadata["Content-Type"] = text, text
		if text == "" {
			m.Metadata["Content-Type"], m.Metadata[watermillbridge.MetadataKey] = "application/json", "A-1" // the payload is no JSON
		}
		want := maps.Clone(m.Metadata)
		if back := travelled(t, m); back.UUID != text || !maps.Equal(back.Metadata, want) || string(back.Payload) != "{" {
			t.Errorf("%s: %q came back as %q with %q", what, want, back.UUID, back.Metadata)
		}
	}
}

func TestForeign_longTextsAreCut(t *testing.T) {
	t.Parallel()
	for what, piece := range map[string]string{"letters": "x", "lines": "line\n", "bytes": "\xff", "umlauts": "ü"} {
		m := message.NewMessage("1", nil)
		m.Metadata = message.Metadata{}
		for i := range 100 {
			m.Metadata[fmt.Sprintf("a%02d", i)] = strings.Repeat(piece, 10_000)
		}
		m.Metadata["reason_poisoned"] = strings.Repeat(piece, 100_000)
		back := travelled(t, m)
		reason, isCut := strings.CutSuffix(back.Metadata["reason_poisoned"], "…")
		if !isCut || len(reason) < 900 || !strings.HasPrefix(m.Metadata["reason_poisoned"], reason) || back.Metadata["watermill-left-out"] == "" {
			t.Errorf("%s: %d bytes arrived, cut %v, with %q left out", what, len(reason), isCut, back.Metadata["watermill-left-out"])
		}
	}
}

// The error of a handler enters the poison queue, whatever its text is.
func TestForeign_errorsEnterThePoisonQueue(t *testing.T) {
	t.Parallel()
	for _, failure := range []error{
		errors.Join(errors.New("first"), errors.New("second")), errors.New("a\ttab"), errors.New("bytes \xff"), errors.New(strings.Repeat("long\n", 100_000)),
	} {
		var poisoned []outbox.Message
		publisher := watermillbridge.NewPublisher(func(ctx context.Context, m outbox.Message) error {
			_, err := outbox.Prepare(ctx, []outbox.Message{m}, 0)
			poisoned = append(poisoned, m)
			return err
		})
		poison, err := middleware.PoisonQueue(publisher, "order.poisoned")
		if err != nil {
			t.Fatal(err)
		}
		handler := poison(middleware.Recoverer(func(*message.Message) ([]*message.Message, error) { panic(failure) }))
		if _, err := handler(message.NewMessage("1", []byte("{}"))); err != nil || len(poisoned) != 1 {
			t.Errorf("%.50q: %d messages in the poison queue, error %.200v", failure, len(poisoned), err)
		}
	}
}

func FuzzForeign(f *testing.F) {
	for _, text := range foreign {
		f.Add(text, text, text)
	}
	f.Fuzz(func(t *testing.T, name, value, typ string) {
		m := message.NewMessage(value, []byte(value))
		m.Metadata = message.Metadata{name: value, "Content-Type": typ, watermillbridge.MetadataKey: name}
		if _, err := outbox.Prepare(t.Context(), []outbox.Message{sent(t, "a", m)}, 0); err != nil {
			t.Errorf("an outbox refuses it: %v", err)
		}
	})
}
