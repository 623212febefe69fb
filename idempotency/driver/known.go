package driver

import (
	"context"
	"time"
)

// Looker is a Store that an operator can ask about a key. The interface is optional.
type Looker interface {
	Store
	// Look returns what the store knows of a key. It changes nothing, whatever that is.
	Look(ctx context.Context, key Key) (Known, error)
}

// Known is what a store knows of a key.
type Known struct {
	// State is InProgress or Completed. 0: the key is free, and nothing else is set.
	State State
	// Since is when the key was claimed, or when the record of what is completed was stored, whichever
	// the store keeps. Zero: it keeps neither.
	Since time.Time
	// Left is the time until the claim ends without a renewal, or the record of a completed run expires.
	// 0: the store does not tell, or the record may go at any time.
	Left time.Duration
	// Fingerprint is the stored one. It is zero where there is none.
	Fingerprint Fingerprint
	// Response is the stored one, when Completed.
	Response Response
}
