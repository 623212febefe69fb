package inboxamqp

import "time"

// Tuning is what only tests set.
type Tuning struct {
	MaxBodyBytes   int
	ConfirmTimeout time.Duration
}

// Tune changes a consumer that does not run yet; zero fields change nothing.
func Tune(c *Consumer, t Tuning) {
	if t.MaxBodyBytes > 0 {
		c.cfg.maxBodyBytes = t.MaxBodyBytes
	}
	if t.ConfirmTimeout > 0 {
		c.cfg.confirmTimeout = t.ConfirmTimeout
	}
}
