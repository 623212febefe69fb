// Package driver is what a store of package idempotency needs, and its users do not:
// the contract [Store], the [Claim] of one run, and what is kept of it. The suite in
// idempotencytest/conformance says what else a store must do.
//
// Whoever stores an answer in another place than the store, such as the business
// transaction, takes the claim from the context ([ClaimFrom]) and settles it.
// [NewContext] puts a claim there, for a protocol other than HTTP.
package driver

import (
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
	"github.com/holdfast-go/holdfast/idempotency/internal/inctx"
	"github.com/holdfast-go/holdfast/idempotency/internal/keys"
	"github.com/holdfast-go/holdfast/idempotency/internal/sum"
	"github.com/holdfast-go/holdfast/internal/problem"
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

// Response is the kept result of one piece of work: what a repeated request is
// answered with. It is the same struct as idempotency.Response.
type Response struct {
	// Status is the HTTP status, 200 to 999. 0 makes the response a
	// tombstone: the work was done, its result is not there.
	Status int
	// Header holds the kept headers; nil is none.
	Header http.Header
	// Body is the kept body; nil is empty.
	Body []byte
}

// Unavailable reports whether r is a tombstone. A status that is no answer (an
// informational one, or none that HTTP knows) makes one too.
func (r Response) Unavailable() bool { return r.Status < 200 || r.Status > 999 }

// Size is the number of bytes that r takes, headers and body.
func (r Response) Size() int {
	n := len(r.Body)
	for name, values := range r.Header {
		n += len(name)
		for _, v := range values {
			n += len(v)
		}
	}
	return n
}

// Clone returns a copy that shares nothing with r.
func (r Response) Clone() Response {
	return Response{Status: r.Status, Header: r.Header.Clone(), Body: slices.Clone(r.Body)}
}

// CleanHeader returns a copy of h without the headers that must never be given
// to a later caller: cookies, credentials, and what belongs to one connection,
// one moment or one client (Date, Connection, CORS, rate limits …).
func CleanHeader(h http.Header) http.Header {
	out := make(http.Header, len(h))
	for name, values := range h {
		if !headers.Denied(name) {
			out[name] = slices.Clone(values)
		}
	}
	return out
}

// Key is an idempotency.Key, which is at most 195 bytes long. It logs as a short hash.
type Key string

// Validate returns ErrKeyInvalid unless k is safe in the name of a record.
func (k Key) Validate() error {
	if !keys.Valid(string(k)) {
		return ErrKeyInvalid
	}
	return nil
}

// LogValue keeps keys out of logs: whoever knows a key can ask for its answer.
func (k Key) LogValue() slog.Value { return slog.StringValue(keys.Hash(string(k))) }

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

// Fingerprint tells whether two requests with one key are the same request. The
// zero value fits every request: it is what a record has that was written by a
// system without fingerprints.
type Fingerprint struct {
	// Version names the way the second half of Sum was made.
	Version int
	// Sum is 64 hex digits. The first half stands for who asks for what and is
	// always compared. The second half stands for the body and is compared within
	// one Version, so that an upgrade refuses no running key.
	Sum string
}

// FingerprintOf hashes parts (SHA-256 over length-prefixed parts), for work
// that does not come over HTTP. All of it is always compared.
func FingerprintOf(parts ...string) Fingerprint {
	version, digits := sum.OfParts(parts)
	return Fingerprint{Version: version, Sum: digits}
}

// Conflicts reports whether f and other surely belong to different requests.
func (f Fingerprint) Conflicts(other Fingerprint) bool {
	if f.Sum == "" || other.Sum == "" {
		return false
	}
	target, body := f.halves()
	otherTarget, otherBody := other.halves()
	return target != otherTarget || f.Version == other.Version && body != otherBody
}

func (f Fingerprint) halves() (target, body string) {
	n := min(sum.Half, len(f.Sum))
	return f.Sum[:n], f.Sum[n:]
}

// CodeStoreUnavailable is the code of a request that came to nothing because its
// store failed.
const CodeStoreUnavailable = "IDEMPOTENCY_STORE_UNAVAILABLE"

var (
	// ErrKeyInvalid is idempotency.ErrKeyInvalid.
	ErrKeyInvalid error = &problem.Error{
		Text: "idempotency: key is invalid",
		Problem: problem.Problem{
			Status: http.StatusBadRequest, Code: "IDEMPOTENCY_KEY_INVALID",
			Detail: "The header Idempotency-Key must be there once, in the form that this service asks for.",
		},
	}
	// ErrForeignRecord is in the error of a Begin that found what it cannot read, such as a record of another
	// system. It may mean that the work was done, so the caller asks no fallback and runs nothing.
	ErrForeignRecord = errors.New("idempotency: the key has a record of another kind")
	// ErrLeaseLost is idempotency.ErrLeaseLost: the token does not hold the key.
	ErrLeaseLost error = &problem.Error{
		Text: "idempotency: lease lost",
		Problem: problem.Problem{
			Status: http.StatusServiceUnavailable, Code: CodeStoreUnavailable,
			Detail: "Try again with the same Idempotency-Key.", RetryAfter: time.Second,
		},
	}
)
