// Package bounds has the limits that all limiters share.
package bounds

import "time"

const (
	// Charges is the largest number of charges in one decision.
	Charges = 16
	// Reserve is the longest time ahead for which tokens can be reserved.
	Reserve = 24 * time.Hour
)
