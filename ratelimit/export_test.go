package ratelimit

// Leases returns how many limits and keys are known to be asked for.
func (l *Leased) Leases() int { return l.leases.Len() }
