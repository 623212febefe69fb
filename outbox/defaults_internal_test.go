package outbox

import (
	"testing"
	"time"
)

// What zero means is a promise: nothing else would show that one of these has changed.
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
