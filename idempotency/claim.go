package idempotency

import (
	"context"
	"crypto/rand"
	"log/slog"
)

// Claim is the right of one run to do the work behind a key, for as long as its
// lease lasts.
type Claim struct {
	Key Key
	// Token sets this run apart from every other run of the key.
	Token string
	// Fingerprint is that of the request.
	Fingerprint Fingerprint

	run *run
}

// NewClaim makes a claim with a random token. Nothing is held until a store's
// Begin says Acquired.
func NewClaim(key Key, fp Fingerprint) Claim {
	return Claim{Key: key, Token: rand.Text(), Fingerprint: fp}
}

// Settle tells whoever began the claim (the middleware, Execute, Do) that the
// result is durable in another place than its store, such as the business
// database. It ends the renewal of the lease. The store then gets a copy of
// record.Response, and the caller is answered from record: with its response,
// or with a refusal when its fingerprint conflicts or its response is a
// tombstone. replayed says that an earlier run made the record.
//
// Settle does nothing on a claim that did not come from ClaimFrom.
func (c Claim) Settle(record Outcome, replayed bool) {
	if c.run == nil {
		return
	}
	c.run.settled.Store(&settlement{record: record, replayed: replayed})
	c.run.stopRenewal()
}

// LogValue shows the key's hash alone.
func (c Claim) LogValue() slog.Value { return c.Key.LogValue() }

type settlement struct {
	record   Outcome
	replayed bool
}

type claimKey struct{}

// ClaimFrom returns the claim under which ctx runs: the middleware, Execute and
// Do put it there. false: there is none.
func ClaimFrom(ctx context.Context) (Claim, bool) {
	c, ok := ctx.Value(claimKey{}).(Claim)
	return c, ok
}
