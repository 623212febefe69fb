package ratelimit

// Leases returns the number of leases.
func (l *Leased) Leases() int { return l.leases.Len() }
