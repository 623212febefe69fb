package outbox_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

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

// What the caller does to the map later changes nothing.
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
