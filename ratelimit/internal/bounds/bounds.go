// Package bounds has the bounds that the limiters share.
package bounds

import "time"

const (
	// Charges is the number of charges that one decision has at most.
	Charges = 16
	// Reserve is the longest time ahead for which tokens can be reserved.
	Reserve = 24 * time.Hour
)
