package inbox

import "time"

// RetryPolicy says how often and how late a failed message is tried again. The zero value
// is 6 attempts: the retries come after 1, 2, 4, 8 and 16 seconds, each ±20 %.
//
// RabbitMQ waits up to half of a delay and 1.5 s longer, because its delays are fixed.
type RetryPolicy struct {
	// MaxAttempts bounds the attempts of messages whose failures are neither recoverable nor
	// unrecoverable, the first one included: 1 means no retry. Default: 6.
	MaxAttempts int
	// BaseDelay is the delay before the first retry; at least 1 ms. Default: 1 s.
	BaseDelay time.Duration
	// MaxDelay bounds every delay, jitter included. Default: 60 s, or BaseDelay if that is longer.
	MaxDelay time.Duration
	// Multiplier is the growth of the delay from retry to retry; at least 1. Default: 2.
	Multiplier float64
	// Jitter spreads a delay over 1-Jitter, 1 and 1+Jitter times itself; less than 1.
	// Default: 0.2. A negative number means no jitter.
	Jitter float64
	// MaxAge bounds the retries of recoverable failures: a message whose first failure
	// is longer ago is given up. It must stay below the time for which processed messages are
	// remembered. Default: 24 h.
	MaxAge time.Duration
}
