package driver

import (
	"context"
	"crypto/rand"
	"log/slog"

	"github.com/holdfast-go/holdfast/idempotency/internal/inctx"
)

// Claim is the right of one run to do the work behind a key, for as long as its
// lease lasts.
type Claim struct {
	Key Key
	// Token sets this run apart from every other run of the key.
	Token string
	// Fingerprint is that of the request.
	Fingerprint Fingerprint

	holder Holder
}

// NewClaim makes a claim with a random token. Nothing is held until a store's
// Begin says Acquired.
func NewClaim(key Key, fp Fingerprint) Claim {
	return Claim{Key: key, Token: rand.Text(), Fingerprint: fp}
}

// Settle tells whoever began the claim that the result is durable in another
// place than its store, such as the business database. It ends the renewal of the
// lease. The store then gets a copy of record.Response, and the caller is answered
// from record: with its response, or with a refusal when its fingerprint conflicts
// or its response is a tombstone. replayed says that an earlier run made the
// record.
//
// Settle does nothing on a claim that did not come from ClaimFrom.
func (c Claim) Settle(record BeginResult, replayed bool) {
	if c.holder != nil {
		c.holder.Settle(record, replayed)
	}
}

// MarkEffect says that the work has had, or may have had, an effect that nobody
// takes back: see idempotency.MarkEffect. It does nothing on a claim that did not
// come from ClaimFrom.
func (c Claim) MarkEffect() {
	if c.holder != nil {
		c.holder.MarkEffect()
	}
}

// MarkUnavailable says that the work was refused because its store could not be asked, and that nothing was
// done. A request that then keeps no response counts as refused for want of the store. It does nothing on a
// claim that did not come from ClaimFrom.
func (c Claim) MarkUnavailable() {
	if c.holder != nil {
		c.holder.MarkUnavailable()
	}
}

// Keeps returns what is to be stored of resp: without the headers that are never
// stored, and a tombstone if it is too large. final says whether its status is one
// that is kept; if not, nothing of this run may remain. A claim that did not come
// from ClaimFrom keeps everything.
func (c Claim) Keeps(resp Response) (kept Response, final bool) {
	resp.Header = CleanHeader(resp.Header)
	if c.holder == nil {
		return resp, true
	}
	return c.holder.Keeps(resp)
}

// LogValue shows the key's hash alone.
func (c Claim) LogValue() slog.Value { return c.Key.LogValue() }

// Holder is whoever began a claim and ends it: the middleware, or idempotency.Do.
// Its methods are safe for concurrent use.
type Holder interface {
	// Claim returns the claim that is held.
	Claim() Claim
	// Settle is Claim.Settle.
	Settle(record BeginResult, replayed bool)
	// MarkEffect is Claim.MarkEffect.
	MarkEffect()
	// MarkUnavailable is Claim.MarkUnavailable.
	MarkUnavailable()
	// Keeps is Claim.Keeps.
	Keeps(resp Response) (kept Response, final bool)
}

// NewContext returns a context under which ClaimFrom finds the claim of holder.
func NewContext(ctx context.Context, holder Holder) context.Context {
	return context.WithValue(ctx, inctx.Holder{}, holder)
}

// ClaimFrom returns the claim under which ctx runs: the middleware and Do put
// it there. false: there is none.
func ClaimFrom(ctx context.Context) (Claim, bool) {
	holder, ok := ctx.Value(inctx.Holder{}).(Holder)
	if !ok {
		return Claim{}, false
	}
	claim := holder.Claim()
	claim.holder = holder
	return claim, true
}
