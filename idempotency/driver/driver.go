// Package driver has the types that a store of package idempotency needs and its users do not: the contract [Store],
// the [Claim] of one run, and the kept [Response]. The suite in idempotencytest/conformance tests the rest of the
// contract.
//
// Code that stores the answer outside the store, for example in the business transaction, takes the claim from the
// context ([ClaimFrom]) and settles it. [NewContext] puts a claim into a context, for a protocol other than HTTP.
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

// Store keeps one record per key: the run that holds the key under a lease, or the result. Each method is one atomic
// step. A store uses its own clock for all times. The suite in idempotencytest/conformance tests further
// requirements. A Store must be safe for concurrent use.
type Store interface {
	// Begin claims claim.Key for claim.Token unless the key is completed or claimed by another token whose lease is
	// still running. A lease that ran out is taken over. If the token already holds the key, Begin returns Acquired
	// and starts the lease again. If Begin returns an error after ctx has ended, or context.DeadlineExceeded, the
	// claim may be held, or become held later: the caller releases it. After ErrForeignRecord the caller uses no
	// other store.
	Begin(ctx context.Context, claim Claim) (BeginResult, error)
	// Extend starts the lease again. ErrLeaseLost: the token does not hold the key.
	Extend(ctx context.Context, claim Claim) error
	// Complete stores the response, with claim.Fingerprint, and ends the lease, in one step. ErrLeaseLost: the token
	// does not hold the key, and nothing was stored. This is also the error if nobody holds the key, because another
	// run may have held it in the meantime. Completing again with the same token returns nil. The store may keep resp
	// without copying it, so the caller must not change it. A store without leases may settle claim with the record
	// of another run, which then is the answer.
	Complete(ctx context.Context, claim Claim, resp Response) error
	// Release frees the key, so that the next Begin acquires it. ErrLeaseLost: the token does not hold the key, and
	// nothing was freed. A second Release also returns ErrLeaseLost.
	Release(ctx context.Context, claim Claim) error
}

// Tiered is a Store with a fallback that can decide on its own, such as the records in a database. The interface is
// optional.
type Tiered interface {
	Store
	// Fallback returns the store to use when Begin of this one fails, except with ErrForeignRecord. nil: no fallback.
	Fallback() Store
}

// Claimer is an http.Handler that claims the key itself, so that the middleware need not. The interface is optional.
type Claimer interface {
	// StoreFor returns the store that a middleware of store uses for this handler.
	StoreFor(store Store) Store
}

// State is the state of a key in a store.
type State int

const (
	// Acquired means that the caller now holds the key and does the work.
	Acquired State = iota + 1
	// InProgress means that another run is doing the work.
	InProgress
	// Completed means that the work is done.
	Completed
)

// BeginResult is the result of Begin.
type BeginResult struct {
	State State
	// Lease is the length of the lease if Acquired, and the rest of the other run's lease if InProgress. 0 if
	// Acquired means that there is no lease to renew, and that the store itself receives a settled result.
	Lease time.Duration
	// Fingerprint is the stored one, if InProgress or Completed. It is zero if the record has none.
	Fingerprint Fingerprint
	// Response is the stored one, if Completed.
	Response Response
}

// Claim is the right of one run to do the work of a key while its lease lasts.
type Claim struct {
	Key Key
	// Token distinguishes this run from all other runs of the key.
	Token string
	// Fingerprint is the fingerprint of the request.
	Fingerprint Fingerprint

	holder Holder
}

// NewClaim returns a claim with a random token. It is not held until a store's Begin returns Acquired.
func NewClaim(key Key, fp Fingerprint) Claim {
	return Claim{Key: key, Token: rand.Text(), Fingerprint: fp}
}

// Settle notifies the holder of the claim that the result is durable outside its store, for example in the business
// database. It ends the renewal of the lease. The store then gets a copy of record.Response, and the caller is
// answered from record: with its response, or with a problem if its fingerprint conflicts or its response is a
// tombstone. replayed means that an earlier run made the record.
//
// Settle does nothing on a claim that did not come from ClaimFrom.
func (c Claim) Settle(record BeginResult, replayed bool) {
	if c.holder != nil {
		c.holder.Settle(record, replayed)
	}
}

// MarkEffect records that the work has had, or may have had, an effect that cannot be undone: see
// idempotency.MarkEffect. It does nothing on a claim that did not come from ClaimFrom.
func (c Claim) MarkEffect() {
	if c.holder != nil {
		c.holder.MarkEffect()
	}
}

// MarkUnavailable records that the work was rejected because its store was unreachable, and that nothing was done. A
// request without a kept response then counts as store_unavailable. It does nothing on a claim that did not come from
// ClaimFrom.
func (c Claim) MarkUnavailable() {
	if c.holder != nil {
		c.holder.MarkUnavailable()
	}
}

// Keeps returns the part of resp to store: without the headers that are never stored, and a tombstone if it is too
// large. final reports whether a response with this status is kept; if not, no effect of this run may remain. A claim
// that did not come from ClaimFrom keeps everything.
func (c Claim) Keeps(resp Response) (kept Response, final bool) {
	resp.Header = CleanHeader(resp.Header)
	if c.holder == nil {
		return resp, true
	}
	return c.holder.Keeps(resp)
}

// LogValue returns only a hash of the key.
func (c Claim) LogValue() slog.Value { return c.Key.LogValue() }

// Holder begins and ends a claim. It is the middleware or idempotency.Do. Its methods are safe for concurrent use.
type Holder interface {
	// Claim returns the held claim.
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

// NewContext returns a context in which ClaimFrom finds the claim of holder.
func NewContext(ctx context.Context, holder Holder) context.Context {
	return context.WithValue(ctx, inctx.Holder{}, holder)
}

// ClaimFrom returns the claim under which ctx runs. The middleware and Do put it into the context. ok is false
// without a claim.
func ClaimFrom(ctx context.Context) (Claim, bool) {
	holder, ok := ctx.Value(inctx.Holder{}).(Holder)
	if !ok {
		return Claim{}, false
	}
	claim := holder.Claim()
	claim.holder = holder
	return claim, true
}

// Response is the kept result of one piece of work, and the answer to repeated requests. It is the same struct as
// idempotency.Response.
type Response struct {
	// Status is the HTTP status, 200 to 999. 0 makes the response a tombstone: the work was done, but its result was
	// not kept.
	Status int
	// Header holds the kept headers; nil means none.
	Header http.Header
	// Body is the kept body; nil means empty.
	Body []byte
}

// Unavailable reports whether r is a tombstone. An informational status, or one outside 200 to 999, also makes a
// tombstone.
func (r Response) Unavailable() bool { return r.Status < 200 || r.Status > 999 }

// Size returns the number of bytes in r, headers and body.
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

// CleanHeader returns a copy of h without the headers that must never be replayed: cookies, credentials, and headers
// of one connection, one moment or one client (Date, Connection, CORS, rate limits …).
func CleanHeader(h http.Header) http.Header {
	out := make(http.Header, len(h))
	for name, values := range h {
		if !headers.Denied(name) {
			out[name] = slices.Clone(values)
		}
	}
	return out
}

// Key is an idempotency.Key, at most 195 bytes long. It is logged as a short hash.
type Key string

// Validate returns ErrKeyInvalid unless k is safe in the name of a record.
func (k Key) Validate() error {
	if !keys.Valid(string(k)) {
		return ErrKeyInvalid
	}
	return nil
}

// LogValue keeps keys out of logs, because whoever has a key can request its answer.
func (k Key) LogValue() slog.Value { return slog.StringValue(keys.Hash(string(k))) }

// Looker is a Store in which an operator can look up a key. The interface is optional.
type Looker interface {
	Store
	// Look returns the state of a key. It changes nothing.
	Look(ctx context.Context, key Key) (Known, error)
}

// Known is the state of a key in a store.
type Known struct {
	// State is InProgress or Completed. 0: the key is free, and the other fields are zero.
	State State
	// Since is the time of the claim, or the time when the completed record was stored, depending on the store. Zero:
	// the store keeps neither.
	Since time.Time
	// Left is the time until the claim ends without a renewal, or until the record of a completed run expires. 0:
	// unknown, or the record may be deleted at any time.
	Left time.Duration
	// Fingerprint is the stored one. It is zero if there is none.
	Fingerprint Fingerprint
	// Response is the stored one, if Completed.
	Response Response
}

// Fingerprint distinguishes requests with the same key. The zero value matches every request: records written by a
// system without fingerprints have it.
type Fingerprint struct {
	// Version identifies the algorithm of the second half of Sum.
	Version int
	// Sum is 64 hex digits. The first half is a hash of the caller and the target and is always compared. The second
	// half is a hash of the body and is compared only within one Version, so that an upgrade rejects no running key.
	Sum string
}

// FingerprintOf hashes parts (SHA-256 over length-prefixed parts), for work outside HTTP. The whole hash is always
// compared.
func FingerprintOf(parts ...string) Fingerprint {
	version, digits := sum.OfParts(parts)
	return Fingerprint{Version: version, Sum: digits}
}

// Conflicts reports whether f and other certainly belong to different requests.
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

// CodeStoreUnavailable is the code of a request that was rejected because its store failed.
const CodeStoreUnavailable = "IDEMPOTENCY_STORE_UNAVAILABLE"

var (
	// ErrKeyInvalid is idempotency.ErrKeyInvalid.
	ErrKeyInvalid error = &problem.Error{
		Text: "idempotency: key is invalid",
		Problem: problem.Problem{
			Status: http.StatusBadRequest, Code: "IDEMPOTENCY_KEY_INVALID",
			Detail: "The header Idempotency-Key must be sent exactly once, in the form that this service requires.",
		},
	}
	// ErrForeignRecord is in the error of a Begin that found an unreadable record, for example of another system. The
	// record may mean that the work was done, so the caller uses no fallback and runs nothing.
	ErrForeignRecord = errors.New("idempotency: the key has a record in an unknown format")
	// ErrLeaseLost is idempotency.ErrLeaseLost: the token does not hold the key.
	ErrLeaseLost error = &problem.Error{
		Text: "idempotency: lease lost",
		Problem: problem.Problem{
			Status: http.StatusServiceUnavailable, Code: CodeStoreUnavailable,
			Detail: "Try again with the same Idempotency-Key.", RetryAfter: time.Second,
		},
	}
)
