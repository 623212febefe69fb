package expiry

import (
	"cmp"
	"time"
)

// What tests of the package see.
var (
	ParseSchedule     = parseSchedule
	ErrSchedule       = errSchedule
	ErrQuarantineFull = errQuarantineFull
)

// Tuning is what a user cannot set. Zero changes nothing.
type Tuning struct {
	MaxQuarantine            int
	MaxBackoff, PollInterval time.Duration
	Schedule                 schedule
}

// Tune changes a sweeper before its use.
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
