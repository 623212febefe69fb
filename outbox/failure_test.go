package outbox_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"

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
			b.Errorf("report %+v, %v, want an unavailable transport", report, err)
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

func TestNoConfirmIsUnavailable(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		const timeout = 9*time.Second + time.Millisecond // not at a poll, which could run before the pause starts
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

// unruly is a Publisher that breaks the rule to call done exactly once. The relay must cope with it.
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
		// Another relay that can reach the broker takes the message.
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

func TestPolicyByName(t *testing.T) {
	cfg := outbox.RelayConfig{
		Retry: outbox.RetryPolicy{MaxAttempts: 3, BaseDelay: time.Minute, MaxDelay: time.Hour},
		ByName: map[string]outbox.RetryPolicy{
			"few":   {MaxAttempts: 2},
			"quick": {BaseDelay: time.Second, MaxDelay: 2 * time.Second},
		},
		Rand: half,
	}
	for _, tc := range []struct {
		name     string
		class    driver.Class
		attempts int
		took     time.Duration // over all attempts
	}{
		{"other", driver.Retryable, 3, 3 * time.Minute},
		{"other", driver.Unroutable, 3, 3 * time.Minute},
		{"other", "nonsense", 3, 3 * time.Minute},
		{"other", driver.Permanent, 1, 0},
		{"few", driver.Retryable, 2, time.Minute},
		{"few", driver.Permanent, 1, 0},
		{"quick", driver.Retryable, 3, 3 * time.Second},
	} {
		t.Run(tc.name+" "+string(tc.class), func(t *testing.T) {
			inBubble(t, cfg, func(b *bench) {
				calls := 0
				b.publisher.Respond(func(driver.Message) error { calls++; return failure(tc.class) })
				m := message("k", 1)
				m.Name = tc.name
				b.write(m)
				begin := time.Now()
				stop := b.start()
				for len(b.dead()) == 0 {
					time.Sleep(time.Second)
					synctest.Wait()
				}
				took := time.Since(begin)
				stop()
				if d := b.dead()[0]; d.Attempts != tc.attempts || d.Class != string(driver.ClassOf(failure(tc.class))) || d.Error == "" {
					b.Errorf("dead letter %+v", d)
				}
				if calls != tc.attempts || took < tc.took || took > tc.took+10*time.Second {
					b.Errorf("%d attempts in %v, want %d in %v", calls, took, tc.attempts, tc.took)
				}
			})
		})
	}
}

// Changing the map after NewRelay has no effect.
func TestPolicyIsCopied(t *testing.T) {
	byName := map[string]outbox.RetryPolicy{"order.placed": {MaxAttempts: 1}}
	inBubble(t, outbox.RelayConfig{ByName: byName}, func(b *bench) {
		byName["order.placed"] = outbox.RetryPolicy{MaxAttempts: 9}
		b.publisher.Respond(func(driver.Message) error { return failure(driver.Retryable) })
		b.write(message("k", 1))
		if report := b.drain(outbox.Bounds{}); report.Dead != 1 {
			b.Errorf("%+v", report)
		}
	})
}

func TestPolicyIsValidated(t *testing.T) {
	t.Parallel()
	_, err := outbox.NewRelay(outboxtest.New(), outboxtest.NewPublisher(), outbox.RelayConfig{
		Retry: outbox.RetryPolicy{MaxAttempts: -1},
		ByName: map[string]outbox.RetryPolicy{
			"Bad Name": {},
			"a":        {MaxAttempts: -2},
			"b":        {BaseDelay: time.Hour},
		},
	})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{
		"RelayConfig.Retry.MaxAttempts is -1", `ByName: "Bad Name"`, `ByName["a"].MaxAttempts is -2`,
		`ByName["b"].BaseDelay is 1h0m0s`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in\n%v", want, err)
		}
	}
}

// garbled is a Source that reports messages with the body "0" as unreadable.
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

// An unreadable message becomes a dead letter, its key continues, and no publisher receives it.
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
				b.Error("published an unreadable message")
			}
		}
		for _, d := range b.dead() {
			if d.Class != string(driver.Permanent) || !strings.Contains(d.Error, "headers of another kind") {
				b.Errorf("dead letter %+v", d)
			}
		}
	})
}

// An unreadable message does not end the pause of its transport.
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

// foreignIDs is a Source of messages to which another program gave invalid ids or names.
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

// A stream of failing messages causes an occasional log line of each kind, not one for each message.
func TestRelay_limitsLogLines(t *testing.T) {
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
		// Three names that fail and are dead-lettered, and panicked, paused and resumed: nine kinds. Each logs at 0,
		// 10 and 20 s, and once more if it starts later.
		if most := 9 * 4; lines > most || lines < 9 {
			b.Errorf("%d lines, want 9 to %d:\n%s", lines, most, text.String())
		}
		for _, want := range []string{"name=one class=unroutable", "name=another", "dead-lettered", "panicked", "paused"} {
			if !strings.Contains(text.String(), want) {
				b.Errorf("the log does not contain %q:\n%s", want, text.String())
			}
		}
		if !regexp.MustCompile(`repeats=[1-9]`).MatchString(text.String()) {
			b.Errorf("the log does not contain the number of lines left out:\n%s", text.String())
		}
	})
}
