package expiry

import (
	"testing"
	"time"
)

// What zero means is a promise: nothing else would show that one of these has changed.
func TestDefaults(t *testing.T) {
	t.Parallel()
	c := SweeperConfig{}.withDefaults()
	for name, value := range map[string][2]any{
		"BatchSize":       {c.BatchSize, 200},
		"Quarantine":      {c.Quarantine, 5 * time.Minute},
		"MaxQuarantine":   {c.MaxQuarantine, 1000},
		"ShutdownTimeout": {c.ShutdownTimeout, 10 * time.Second},
		"MaxBackoff":      {c.MaxBackoff, 5 * time.Second},
	} {
		if value[0] != value[1] {
			t.Errorf("%s is %v, want %v", name, value[0], value[1])
		}
	}
}
