package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
	"github.com/holdfast-go/holdfast/txretry/txretrytest"
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

func TestClassesDecideTheAttempts(t *testing.T) {
	for _, tc := range []struct {
		class    driver.Class
		cfg      outbox.RelayConfig
		attempts int
	}{
		{driver.Retryable, outbox.RelayConfig{}, 10},
		{driver.Unroutable, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 3}}, 3},
		{driver.Permanent, outbox.RelayConfig{}, 1},
		{"nonsense", outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxAttempts: 2}}, 2},
	} {
		t.Run(fmt.Sprintf("%s_%d", tc.class, tc.attempts), func(t *testing.T) {
			tc.cfg.Retry.MaxDelay = time.Minute
			inBubble(t, tc.cfg, func(b *bench) {
				calls := 0
				b.publisher.Respond(func(driver.Message) error { calls++; return failure(tc.class) })
				b.write(message("k", 1))
				report := b.drain(outbox.Bounds{TimeLimit: time.Hour})
				dead := b.dead()
				if calls != tc.attempts || report.Failed != tc.attempts || report.Dead != 1 || len(dead) != 1 {
					b.Fatalf("%d calls, report %+v, %d dead letters", calls, report, len(dead))
				}
				if dead[0].Attempts != tc.attempts || dead[0].Class != string(driver.ClassOf(failure(tc.class))) || dead[0].Error == "" {
					b.Errorf("dead letter %+v", dead[0])
				}
			})
		})
	}
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
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		manager, store := txretrytest.New(txretrytest.Config{}), outboxtest.New()
		good, bad := outboxtest.NewPublisher(), outboxtest.NewPublisher()
		bad.Respond(func(driver.Message) error { return failure(driver.Unavailable) })
		relay, err := outbox.NewRelay(store, good,
			outbox.RelayConfig{Transports: map[string]driver.Publisher{"other": bad}, BatchSize: 2, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		for n := range 20 {
			m := message("", n)
			if n < 10 {
				m.Transport = "other"
			}
			if err := manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, m) }); err != nil {
				t.Fatal(err)
			}
		}
		report, err := relay.Drain(t.Context(), outbox.Bounds{})
		if report.Published != 10 || report.Failed != 0 {
			t.Errorf("report %+v", report)
		}
		if driver.ClassOf(err) != driver.Unavailable {
			t.Errorf("Drain says %v, want that a transport is unavailable", err)
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
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		manager, store := txretrytest.New(txretrytest.Config{}), outboxtest.New()
		const timeout = 9*time.Second + time.Millisecond // not when the relay looks again, which may come before the pause begins
		relay, err := outbox.NewRelay(store, silent{}, outbox.RelayConfig{PublishTimeout: timeout, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if err := manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error { return store.Write(ctx, tx, message("k", 1)) }); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if _, err := relay.Drain(t.Context(), outbox.Bounds{}); driver.ClassOf(err) != driver.Unavailable {
			t.Errorf("Drain: %v", err)
		}
		if took := time.Since(begin); took != timeout {
			t.Errorf("it took %v, want PublishTimeout", took)
		}
		if left := store.Pending(); len(left) != 1 || left[0].Attempts != 0 {
			t.Errorf("left %+v", left)
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
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		manager, store := txretrytest.New(txretrytest.Config{}), outboxtest.New()
		publisher := &unruly{}
		relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if err := manager.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			return store.Write(ctx, tx, message("k", 1), message("k", 2), message("k", 3))
		}); err != nil {
			t.Fatal(err)
		}
		report, err := relay.Drain(t.Context(), outbox.Bounds{})
		if report != (outbox.Report{Published: 1}) || driver.ClassOf(err) != driver.Unavailable {
			t.Errorf("report %+v, %v", report, err)
		}
		for _, done := range publisher.late {
			done(nil)
		}
		if left := bodies(store.Pending()); !slices.Equal(left, []string{"2", "3"}) {
			t.Errorf("left %v", left)
		}
	})
}

func TestOutcomesAreSettledAndLogged(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		text := b.logging(outbox.RelayConfig{})
		s := &settled{Source: b.store}
		relay, err := outbox.NewRelay(s, b.publisher, outbox.RelayConfig{
			Retry: outbox.RetryPolicy{MaxAttempts: 2}, Rand: half, Logger: b.relay.Logger(),
		})
		if err != nil {
			b.Fatal(err)
		}
		b.publisher.Script(failure(driver.Unavailable), errors.New("first"), errors.New("second"))
		b.write(message("k", 1), message("k", 2))
		if _, err := relay.Drain(b.Context(), outbox.Bounds{TimeLimit: time.Minute}); err != nil {
			b.Error(err)
		}
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
		if err != nil {
			b.Fatal(err)
		}
		if _, err := other.Drain(b.Context(), outbox.Bounds{TimeLimit: time.Minute}); err != nil || len(b.store.Pending()) > 0 {
			b.Fatalf("%v, left %d", err, len(b.store.Pending()))
		}
		time.Sleep(time.Minute)
		if err := b.relay.Ready(b.Context()); err != nil {
			b.Errorf("Ready: %v", err)
		}
	})
}
