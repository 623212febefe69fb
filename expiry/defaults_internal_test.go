package expiry

import (
	"cmp"
	"testing"
	"time"
)

// The meaning of zero is a promise, and no other test would show that a default has changed.
func TestDefaults(t *testing.T) {
	t.Parallel()
	c := SweeperConfig{}.withDefaults()
	for name, value := range map[string][2]any{
		"Schedule":        {c.Schedule, "*/30 * * * *"},
		"BatchSize":       {c.BatchSize, 200},
		"BatchTimeout":    {c.BatchTimeout, 5 * time.Second},
		"PollInterval":    {c.PollInterval, 90 * time.Second},
		"Quarantine":      {c.Quarantine, 5 * time.Minute},
		"ShutdownTimeout": {c.ShutdownTimeout, 10 * time.Second},
		"maxQuarantine":   {defaultTuning.maxQuarantine, 1000},
		"maxBackoff":      {defaultTuning.maxBackoff, 5 * time.Second},
		"minPause":        {defaultTuning.minPause, 100 * time.Millisecond},
	} {
		if value[0] != value[1] {
			t.Errorf("%s is %v, want %v", name, value[0], value[1])
		}
	}
}

// Internals for the external tests.
var (
	ParseSchedule     = parseSchedule
	ErrSchedule       = errSchedule
	ErrQuarantineFull = errQuarantineFull
)

// Tuning has the values that a user cannot set. Zero changes nothing.
type Tuning struct {
	MaxQuarantine            int
	MaxBackoff, PollInterval time.Duration
	Schedule                 schedule
}

// Tune changes a sweeper before its first use.
func (s *Sweeper) Tune(t Tuning) *Sweeper {
	s.tune(tuning{
		minPause:      defaultTuning.minPause,
		maxQuarantine: cmp.Or(t.MaxQuarantine, defaultTuning.maxQuarantine),
		maxBackoff:    cmp.Or(t.MaxBackoff, defaultTuning.maxBackoff),
	})
	s.cfg.PollInterval = cmp.Or(t.PollInterval, s.cfg.PollInterval)
	if t.Schedule != nil {
		s.schedule = t.Schedule
	}
	return s
}
