package inboxamqp

import (
	"testing"
	"time"
)

// What zero means is a promise: nothing else would show that one of these has changed.
func TestDefaults(t *testing.T) {
	t.Parallel()
	c := newSettings("orders", nil, Config{}, tuning{})
	for name, value := range map[string][2]any{
		"Concurrency":     {c.Concurrency, 8},
		"Prefetch":        {c.Prefetch, 16},
		"Timeout":         {c.Timeout, 5 * time.Second},
		"confirmTimeout":  {c.confirmTimeout, 15 * time.Second},
		"HandlerTimeout":  {c.HandlerTimeout, time.Minute},
		"MaxCrashes":      {c.MaxCrashes, 5},
		"retention":       {c.retention, 8 * 24 * time.Hour},
		"Name":            {c.Name, "orders"},
		"ShutdownTimeout": {c.ShutdownTimeout, time.Minute},
		"MaxAttempts":     {c.Retry.MaxAttempts, 6},
		"BaseDelay":       {c.Retry.BaseDelay, time.Second},
		"MaxDelay":        {c.Retry.MaxDelay, time.Minute},
	} {
		if value[0] != value[1] {
			t.Errorf("%s is %v, want %v", name, value[0], value[1])
		}
	}
}
