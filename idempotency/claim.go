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

// Settle tells whoever began the claim (the middleware or Do) that the result
// is durable in another place than its store, such as the business database. It
// ends the renewal of the lease. The store then gets a copy of record.Response,
// and the caller is answered from record: with its response, or with a refusal
// when its fingerprint conflicts or its response is a tombstone. replayed says
// that an earlier run made the record.
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

// ClaimFrom returns the claim under which ctx runs: the middleware and Do put
// it there. false: there is none.
func ClaimFrom(ctx context.Context) (Claim, bool) {
	r, ok := ctx.Value(claimKey{}).(*run)
	if !ok {
		return Claim{}, false
	}
	return r.claim, true
}

// MarkEffect says that the work under ctx has had, or may have had, an effect
// that nobody takes back: call it before a payment is sent. From then on the key
// is never free again: a response that would not be kept is kept, and after an
// error, a panic or a response that cannot be kept there is a tombstone. Without
// a claim in ctx it does nothing.
//
// The mark is in memory only. If the process dies, the lease runs out and the
// key runs again: give the effect a key of its own, see ChildKey.
func MarkEffect(ctx context.Context) {
	if r, ok := ctx.Value(claimKey{}).(*run); ok {
		r.effect.Store(true)
	}
}

// ChildKey returns the key for a part of the work under ctx, such as a call to
// a payment provider: always the same one for the same name below the same key,
// whichever run asks for it, and nothing that could be known without the key.
// Without a claim in ctx it is ErrNoClaim.
func ChildKey(ctx context.Context, name string) (Key, error) {
	claim, ok := ClaimFrom(ctx)
	if !ok {
		return "", ErrNoClaim
	}
	return claim.Key.child(name), nil
}
