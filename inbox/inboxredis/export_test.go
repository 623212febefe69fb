package inboxredis

import "time"

var ErrInProgress = errInProgress

// SetTimeout sets how long the shortcut waits for Redis.
func (p *Processor) SetTimeout(d time.Duration) { p.shortcut.timeout = d }
