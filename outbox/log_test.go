package outbox_test

import (
	"bytes"
	"log/slog"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// A stream of messages that fail costs a line of each kind now and then, and not one for each message.
func TestLogOfAStream(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		var text bytes.Buffer
		b.over(b.store, outbox.RelayConfig{
			Transports: map[string]driver.Publisher{"other": outboxtest.NewPublisher()},
			Retry:      outbox.RetryPolicy{MaxAttempts: 2}, Logger: slog.New(slog.NewTextHandler(&text, nil)),
		})
		b.publisher.Respond(func(m driver.Message) error {
			switch m.Name {
			case "panics":
				panic("boom")
			case "down":
				return failure(driver.Unavailable)
			default:
				return failure(driver.Unroutable)
			}
		})
		stop := b.start()
		const seconds = 25
		for range 10 * seconds {
			for _, name := range []string{"one", "another", "panics", "down"} {
				m := message("", 0)
				m.Name = name
				b.write(m)
			}
			b.relay.Wake()
			time.Sleep(100 * time.Millisecond)
		}
		synctest.Wait()
		stop()
		lines := strings.Count(text.String(), "\n")
		// Failed, for good, by three names; panicked, paused, resumed: nine kinds, each at 0, 10 and 20 s, and one more
		// for what begins later.
		if most := 9 * 4; lines > most || lines < 9 {
			b.Errorf("%d lines, want 9 to %d:\n%s", lines, most, text.String())
		}
		for _, want := range []string{"name=one class=unroutable", "name=another", "dead letter", "panicked", "paused"} {
			if !strings.Contains(text.String(), want) {
				b.Errorf("the log does not say %q:\n%s", want, text.String())
			}
		}
		if !regexp.MustCompile(`repeats=[1-9]`).MatchString(text.String()) {
			b.Errorf("the log does not say how many lines it left out:\n%s", text.String())
		}
	})
}
