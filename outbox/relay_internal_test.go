package outbox

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// The defaults are part of the API, and no other test would fail if one changed.
func TestDefaults(t *testing.T) {
	t.Parallel()
	c := RelayConfig{}.withDefaults()
	for name, value := range map[string][2]any{
		"BatchSize":       {c.BatchSize, 500},
		"PublishTimeout":  {c.PublishTimeout, 10 * time.Second},
		"ShutdownTimeout": {c.ShutdownTimeout, 15 * time.Second},
		"Retry.Attempts":  {c.Retry.MaxAttempts, 10},
		"Retry.MaxDelay":  {c.Retry.MaxDelay, 5 * time.Minute},
		"storeTimeout":    {c.storeTimeout(), 5 * time.Second},
		"longest pause":   {unavailable.Max, 2 * time.Second},
	} {
		if value[0] != value[1] {
			t.Errorf("%s is %v, want %v", name, value[0], value[1])
		}
	}
}

// A batch that tries a transport after its pause may end without sending to it, for example because its leases
// expired. The next batch then tries.
func TestBreaker_probesAgainAfterUnusedTry(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &breaker{delay: func(int) time.Duration { return time.Second }}
		began := time.Now()
		if _, _, paused := b.fail(outage{errors.New("down"), began}, began); !paused || !b.leftAlone() {
			t.Fatal("a failure does not pause the transport")
		}
		time.Sleep(2 * time.Second)
		for _, answered := range []bool{false, true} {
			if b.leftAlone() {
				t.Fatal("no batch may try after the pause")
			}
			begin := time.Now()
			b.try(begin)
			if !b.leftAlone() {
				t.Error("a second batch may try at the same time")
			}
			if _, resumed := b.end(begin, answered); resumed != answered {
				t.Errorf("answered: %v, resumed: %v", answered, resumed)
			}
		}
		if b.paused() != nil {
			t.Error("the pause has not ended")
		}
	})
}
