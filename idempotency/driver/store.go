package driver

import (
	"context"
	"time"
)

// Store keeps one record per key: who is working on it, under a lease, or what
// came of it. Each method is one atomic step. A store decides about time by its
// own clock. The suite in idempotencytest/conformance says what else a store
// must do; a Store must be safe for concurrent use.
type Store interface {
	// Begin claims claim.Key for claim.Token unless the key is completed or
	// claimed by a token whose lease is still running. A lease that ran out is
	// taken over. Asking again with the token that holds the key is Acquired, and
	// starts the lease anew. After an error that comes when ctx has ended, or is
	// context.DeadlineExceeded, the claim may be held, or be held later: the caller
	// releases it. After ErrForeignRecord the caller asks no other store.
	Begin(ctx context.Context, claim Claim) (BeginResult, error)
	// Extend starts the lease anew. ErrLeaseLost: the token does not hold it.
	Extend(ctx context.Context, claim Claim) error
	// Complete stores the response, with claim.Fingerprint, and ends the lease,
	// in one step. ErrLeaseLost: the token does not hold it, and nothing was
	// stored, also if nobody holds it: that no other run was there meanwhile
	// cannot be known. Completing again with the same token is nil. The store
	// may keep resp itself: the caller does not change it. A store that gives no
	// leases may settle claim with the record of another run, which is then the answer.
	Complete(ctx context.Context, claim Claim, resp Response) error
	// Release frees the key, so that the next Begin acquires it. ErrLeaseLost:
	// the token does not hold it (any more: releasing again is no different), and
	// nothing was freed.
	Release(ctx context.Context, claim Claim) error
}

// Tiered is a Store with something behind it that can decide alone, such as the
// records in a database. The interface is optional.
type Tiered interface {
	Store
	// Fallback returns the store to ask when a Begin of this one fails, unless with ErrForeignRecord. nil: none.
	Fallback() Store
}

// Claimer is an http.Handler whose work itself asks for the key, so that the middleware need not. The
// interface is optional.
type Claimer interface {
	// StoreFor returns the store that the middleware of store asks on behalf of the handler.
	StoreFor(store Store) Store
}

// State is what a store knows about a key.
type State int

const (
	// Acquired means that the caller holds the key now and does the work.
	Acquired State = iota + 1
	// InProgress means that someone else is doing the work.
	InProgress
	// Completed means that the work is done.
	Completed
)

// BeginResult is the answer of Begin.
type BeginResult struct {
	State State
	// Lease is the length of the lease when Acquired, and what is left of the
	// other one's when InProgress. 0 when Acquired: there is no lease to renew,
	// and the store itself knows of a result that is settled.
	Lease time.Duration
	// Fingerprint is the stored one, when InProgress or Completed. It is zero
	// where the record has none.
	Fingerprint Fingerprint
	// Response is the stored one, when Completed.
	Response Response
}
