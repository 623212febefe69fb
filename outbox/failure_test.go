package outbox_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

func TestFailureHoldsBackItsKeyOnly(t *testing.T) {
	inBubble(t, outbox.RelayConfig{Rand: half}, func(b *bench) {
		failed := false
		b.publisher.Respond(func(m driver.Message) error {
			if string(m.Body) == "1" && !failed {
				failed = true
				return errors.New("not now")
			}
			return nil
		})
		b.write(message("k", 1), message("k", 2), message("j", 3), message("k", 4))
		report := b.drain(outbox.Bounds{})
		b.wantReceived("3")
		if report != (outbox.Report{Published: 1, Failed: 1, Ended: "empty"}) || report.ExitCode() != 1 {
			b.Errorf("report %+v", report)
		}
		if left := b.store.Pending(); left[0].Attempts != 1 || left[1].Attempts != 0 {
			b.Errorf("attempts %d and %d", left[0].Attempts, left[1].Attempts)
		}
		time.Sleep(time.Second)
		report = b.drain(outbox.Bounds{})
		b.wantReceived("3", "1", "2", "4")
		if report.ExitCode() != 0 {
			b.Errorf("report %+v", report)
		}
	})
}

func TestUnavailableCostsNothingAndResumes(t *testing.T) {
	for _, class := range []driver.Class{driver.Unavailable, driver.Blocked} {
		t.Run(string(class), func(t *testing.T) {
			inBubble(t, outbox.RelayConfig{}, func(b *bench) {
				b.publisher.Respond(func(driver.Message) error { return failure(class) })
				for n := range 50 {
					b.write(message("k"+strconv.Itoa(n%5), n))
				}
				defer b.start()()
				time.Sleep(10 * time.Minute)
				if b.relay.Ready(b.Context()) == nil {
					b.Error("Ready while the only transport is down")
				}
				for _, m := range b.store.Pending() {
					if m.Attempts != 0 {
						b.Fatalf("an outage cost %d attempts", m.Attempts)
					}
				}
				b.publisher.Respond(nil)
				time.Sleep(3 * time.Second) // the longest pause
				synctest.Wait()
				if n := len(b.publisher.Received()); n != 50 {
					b.Errorf("%d of 50 arrived", n)
				}
				if err := b.relay.Ready(b.Context()); err != nil {
					b.Errorf("Ready: %v", err)
				}
			})
		})
	}
}

func TestOneTransportDownLeavesTheOthers(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		bad := outboxtest.NewPublisher()
		bad.Respond(func(driver.Message) error { return failure(driver.Unavailable) })
		b.between(b.store, b.publisher, outbox.RelayConfig{Transports: map[string]driver.Publisher{"other": bad}, BatchSize: 2})
		for n := range 20 {
			m := message("", n)
			if n < 10 {
				m.Transport = "other"
			}
			b.write(m)
		}
		report, err := b.relay.Drain(b.Context(), outbox.Bounds{})
		if report.Published != 10 || report.Failed != 0 || driver.ClassOf(err) != driver.Unavailable {
			b.Errorf("report %+v, %v, want that a transport is unavailable", report, err)
		}
	})
}

func TestUnknownTransportBecomesDeadLetter(t *testing.T) {
	inBubble(t, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 2}}, func(b *bench) {
		m := message("", 1)
		m.Transport = "nowhere"
		b.write(m, message("", 2))
		b.drain(outbox.Bounds{TimeLimit: time.Minute})
		b.wantReceived("2")
		if dead := b.dead(); len(dead) != 1 || dead[0].Error != `outbox: publish: retryable: the relay has no transport "nowhere"` {
			b.Errorf("dead letters %+v", dead)
		}
	})
}

func TestPanicIsAFailure(t *testing.T) {
	inBubble(t, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 1}}, func(b *bench) {
		b.publisher.Respond(func(m driver.Message) error {
			if string(m.Body) == "1" {
				panic("boom")
			}
			return nil
		})
		b.write(message("k", 1), message("k", 2))
		b.drain(outbox.Bounds{})
		b.wantReceived("2")
		if len(b.dead()) != 1 {
			b.Error("no dead letter")
		}
	})
}

// silent never confirms, as a broker that is stopped.
type silent struct{}

func (silent) Publish(ctx context.Context, _ driver.Message, done func(error)) {
	context.AfterFunc(ctx, func() { done(failure(driver.Unavailable)) })
}

func TestNoConfirmIsUnavailable(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		const timeout = 9*time.Second + time.Millisecond // not when the relay looks again, which may come before the pause begins
		b.between(b.store, silent{}, outbox.RelayConfig{PublishTimeout: timeout})
		b.write(message("k", 1))
		begin := time.Now()
		if _, err := b.relay.Drain(b.Context(), outbox.Bounds{}); driver.ClassOf(err) != driver.Unavailable {
			b.Errorf("Drain: %v", err)
		}
		if took := time.Since(begin); took != timeout {
			b.Errorf("it took %v, want PublishTimeout", took)
		}
		if left := b.store.Pending(); len(left) != 1 || left[0].Attempts != 0 {
			b.Errorf("left %+v", left)
		}
	})
}

// A Publisher that breaks the rule of done, called once, does no harm.
type unruly struct{ late []func(error) }

func (u *unruly) Publish(_ context.Context, m driver.Message, done func(error)) {
	switch string(m.Body) {
	case "1":
		done(nil)
		done(errors.New("twice"))
		panic("after the answer")
	case "2":
		u.late = append(u.late, done)
	}
}

func TestUnrulyPublisher(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		publisher := &unruly{}
		b.between(b.store, publisher, outbox.RelayConfig{})
		b.write(message("k", 1), message("k", 2), message("k", 3))
		report, err := b.relay.Drain(b.Context(), outbox.Bounds{})
		if report != (outbox.Report{Published: 1}) || driver.ClassOf(err) != driver.Unavailable {
			b.Errorf("report %+v, %v", report, err)
		}
		for _, done := range publisher.late {
			done(nil)
		}
		if left := bodies(b.store.Pending()); !slices.Equal(left, []string{"2", "3"}) {
			b.Errorf("left %v", left)
		}
	})
}

func TestOutcomesAreSettledAndLogged(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		text := b.logging(outbox.RelayConfig{})
		s := &settled{Source: b.store}
		b.over(s, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 2}, Rand: half, Logger: b.relay.Logger()})
		b.publisher.Script(failure(driver.Unavailable), errors.New("first"), errors.New("second"))
		b.write(message("k", 1), message("k", 2))
		b.drain(outbox.Bounds{TimeLimit: time.Minute})
		if got := strings.Count(text(), "transport paused"); got != 1 {
			b.Errorf("%d pauses: %s", got, text())
		}
		if len(s.all) != 3 {
			b.Fatalf("settled %+v", s.all)
		}
		first, second, third := s.all[0], s.all[1], s.all[2]
		if first.Verdict != driver.Failed || first.Delay != time.Second || first.Err != "first" {
			b.Errorf("first %+v", first)
		}
		if second.Verdict != driver.Dead || second.Err != "second" || third.Verdict != driver.Published {
			b.Errorf("then %+v, %+v", second, third)
		}
	})
}

func TestPauseIsForgottenWithItsMessages(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		b.publisher.Respond(func(driver.Message) error { return failure(driver.Unavailable) })
		b.write(message("k", 1))
		defer b.start()()
		time.Sleep(time.Minute)
		if b.relay.Ready(b.Context()) == nil {
			b.Error("Ready while the only transport is down")
		}
		// Another relay, with a way to the broker, takes the message.
		other, err := outbox.NewRelay(b.store, outboxtest.NewPublisher(), outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler)})
		must(b, err)
		if _, err := other.Drain(b.Context(), outbox.Bounds{TimeLimit: time.Minute}); err != nil || len(b.store.Pending()) > 0 {
			b.Fatalf("%v, left %d", err, len(b.store.Pending()))
		}
		time.Sleep(time.Minute)
		if err := b.relay.Ready(b.Context()); err != nil {
			b.Errorf("Ready: %v", err)
		}
	})
}
