package outbox_test

import (
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

func TestPolicyByName(t *testing.T) {
	classes := map[driver.Class]int{driver.Unroutable: 7, driver.Permanent: 2}
	cfg := outbox.RelayConfig{
		Policy: outbox.Policy{MaxAttempts: 3, MaxAttemptsByClass: classes, RetryDelay: time.Minute, MaxRetryDelay: time.Hour},
		ByName: map[string]outbox.Policy{
			"few":   {MaxAttempts: 2},
			"once":  {MaxAttemptsByClass: map[driver.Class]int{driver.Unroutable: 1}},
			"quick": {RetryDelay: time.Second, MaxRetryDelay: 2 * time.Second},
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
		{"other", driver.Unroutable, 7, (1 + 2 + 4 + 8 + 16 + 32) * time.Minute},
		{"other", driver.Permanent, 2, time.Minute},
		{"few", driver.Retryable, 2, time.Minute},
		{"few", driver.Unroutable, 7, 63 * time.Minute},
		{"once", driver.Unroutable, 1, 0},
		{"once", driver.Retryable, 3, 3 * time.Minute},
		{"once", driver.Permanent, 1, 0}, // its map takes the place of the default's
		{"quick", driver.Unroutable, 7, (1 + 2 + 2 + 2 + 2 + 2) * time.Second},
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
				if calls != tc.attempts || took < tc.took || took > tc.took+10*time.Second {
					b.Errorf("%d attempts in %v, want %d in %v", calls, took, tc.attempts, tc.took)
				}
			})
		})
	}
}

// What the caller does to the maps later changes nothing.
func TestPolicyIsCopied(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		classes := map[driver.Class]int{driver.Retryable: 1}
		byName := map[string]outbox.Policy{"order.placed": {MaxAttemptsByClass: classes}}
		cfg := outbox.RelayConfig{ByName: byName, Logger: slog.New(slog.DiscardHandler)}
		store, publisher := outboxtest.New(), outboxtest.NewPublisher()
		relay, err := outbox.NewRelay(store, outbox.Transports{"": publisher}, cfg)
		if err != nil {
			t.Fatal(err)
		}
		classes[driver.Retryable] = 9
		byName["order.placed"] = outbox.Policy{MaxAttempts: 9}
		b := &bench{T: t, manager: newManager(), store: store, publisher: publisher, relay: relay}
		publisher.Respond(func(driver.Message) error { return failure(driver.Retryable) })
		b.write(message("k", 1))
		if report := b.drain(outbox.Bounds{}); report.Dead != 1 {
			t.Errorf("%+v", report)
		}
	})
}

func TestPolicyIsValidated(t *testing.T) {
	t.Parallel()
	_, err := outbox.NewRelay(outboxtest.New(), outbox.Transports{"": outboxtest.NewPublisher()}, outbox.RelayConfig{
		Policy: outbox.Policy{MaxAttempts: -1},
		ByName: map[string]outbox.Policy{
			"Bad Name": {},
			"a":        {MaxAttempts: -2},
			"b":        {RetryDelay: time.Hour},
			"c":        {MaxAttemptsByClass: map[driver.Class]int{driver.Blocked: 1}},
			"d":        {MaxAttemptsByClass: map[driver.Class]int{driver.Permanent: -3}},
		},
	})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{
		"RelayConfig.MaxAttempts is -1", `ByName: "Bad Name"`, `ByName["a"].MaxAttempts is -2`,
		`ByName["b"].RetryDelay is 1h0m0s`, `ByName["c"].MaxAttemptsByClass: class "blocked"`, `ByName["d"].MaxAttemptsByClass[permanent] is -3`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in\n%v", want, err)
		}
	}
}
