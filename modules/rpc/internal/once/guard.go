// Package once runs each idempotency key of an RPC once, behind the HTTP middleware of
// idempotency.
package once

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync/atomic"

	"google.golang.org/genproto/googleapis/rpc/code"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/answer"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
)

// Answer is the answer to a call.
type Answer struct {
	Message proto.Message // nil if it failed
	Status  *spb.Status   // of a failure
	Header  http.Header
	Trailer http.Header
}

// Guard is one middleware for the calls of a server. It is safe for concurrent use.
type Guard struct {
	handler http.Handler
	needs   func(procedure string) bool
}

// New returns a Guard for the procedures that need a key. If needs is nil, these are all
// procedures except those without side effects, according to their descriptors.
func New(store driver.Store, scope func(*http.Request) (string, error), needs func(procedure string) bool, cfg idempotency.MiddlewareConfig) (*Guard, error) {
	if cfg.Methods != nil {
		return nil, errors.New("idempotency: Methods is for HTTP: choose procedures by the argument needs")
	}
	if cfg.CanonicalJSON {
		return nil, errors.New("idempotency: CanonicalJSON is for HTTP: messages are compared in their deterministic form")
	}
	if cfg.MaxRequestBytes == 0 {
		cfg.MaxRequestBytes = math.MaxInt64 - 1 // the message is in memory, within the limit of the server
	}
	if cfg.KeepHeaders != nil {
		cfg.KeepHeaders = withTrailers(cfg.KeepHeaders)
	}
	protect, err := idempotency.NewMiddleware(store, scope, cfg)
	if err != nil {
		return nil, err
	}
	if needs == nil {
		needs = hasSideEffects
	}
	return &Guard{handler: protect(http.HandlerFunc(serve)), needs: needs}, nil
}

// Needs reports whether calls of the procedure need a key. gRPC's own services never do.
func (g *Guard) Needs(procedure string) bool {
	return !exchange.OfGRPC(procedure) && g.needs(procedure)
}

// hasSideEffects is true for an unknown procedure.
func hasSideEffects(procedure string) bool {
	name := strings.ReplaceAll(strings.TrimPrefix(procedure, "/"), "/", ".")
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
	if err != nil {
		return true
	}
	options, ok := found.Options().(*descriptorpb.MethodOptions)
	return !ok || options.GetIdempotencyLevel() != descriptorpb.MethodOptions_NO_SIDE_EFFECTS
}

// trailerPrefix marks trailers among the stored headers.
const trailerPrefix = "Grpc-Trailer-"

func withTrailers(names []string) []string {
	all := []string{"Content-Type"}
	for _, name := range names {
		all = append(all, name, trailerPrefix+name)
	}
	return all
}

// callKey is the context key of the *call of a handler.
type callKey struct{}

type call struct {
	run     func(context.Context) Answer
	ran     bool
	got     Answer
	lost    bool // it cannot be stored
	settled atomic.Bool
}

// ownMark is a header that serve adds. It is never stored. The middleware removes it if it answers
// with something else, such as the record of another run that was faster.
const ownMark = "Holdfast-Own"

// stands reports whether the middleware answers with the handler's answer. A record that the
// handler has settled may contain a different one.
func (c *call) stands(head http.Header) bool {
	return c.ran && (c.lost || !c.settled.Load() && head[ownMark] != nil)
}

// holder records whether a claim was settled.
type holder struct {
	claim driver.Claim
	call  *call
}

// Claim implements driver.Holder.
func (h holder) Claim() driver.Claim { return h.claim }

// Settle implements driver.Holder.
func (h holder) Settle(record driver.BeginResult, replayed bool) {
	h.call.settled.Store(true)
	h.claim.Settle(record, replayed)
}

// MarkEffect implements driver.Holder.
func (h holder) MarkEffect() { h.claim.MarkEffect() }

// MarkUnavailable implements driver.Holder.
func (h holder) MarkUnavailable() { h.claim.MarkUnavailable() }

// Keeps implements driver.Holder.
func (h holder) Keeps(resp driver.Response) (driver.Response, bool) { return h.claim.Keeps(resp) }

// Do runs a call whose procedure needs a key. If fresh is true, the answer is the result of run,
// which was called once, and a.Header is to be added to its metadata. Otherwise run was not
// called, or its answer does not count.
func (g *Guard) Do(ctx context.Context, about exchange.Call, request proto.Message, run func(context.Context) Answer) (a Answer, fresh bool) {
	body, err := canonical(request)
	if err != nil {
		return Answer{Status: &spb.Status{Code: int32(code.Code_INVALID_ARGUMENT), Message: "the message cannot be encoded"}}, false
	}
	about.Body = body
	c := &call{run: run}
	w := exchange.NewWriter()
	g.handler.ServeHTTP(w, about.Request(context.WithValue(ctx, callKey{}, c)))
	stands := c.stands(w.Head)
	delete(w.Head, ownMark)
	if stands {
		return Answer{Message: c.got.Message, Status: c.got.Status, Header: bypassed(w.Head)}, true
	}
	a.Header, a.Trailer = split(w.Head)
	if a.Status = w.Refusal(); a.Status != nil {
		return a, false
	}
	a.Message, a.Status, err = answer.Decode(idempotency.Response{Status: w.Status, Header: w.Head, Body: w.Body})
	if err != nil {
		a.Message, a.Status = nil, unreadable(err)
	}
	return a, false
}

// canonical returns a message in the form in which calls are compared. Unknown fields are left
// out: they keep the order of the wire, which may differ between equal messages.
func canonical(m proto.Message) ([]byte, error) {
	deterministic := proto.MarshalOptions{Deterministic: true}
	all, err := deterministic.Marshal(m)
	if err != nil {
		return nil, err
	}
	known := m.ProtoReflect().New().Interface()
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(all, known); err != nil {
		return nil, err
	}
	return deterministic.Marshal(known)
}

// unreadable is the answer if a record cannot be read: the work was done.
func unreadable(err error) *spb.Status {
	s := exchange.StatusOf(idempotency.ErrResultUnavailable)
	s.Message = fmt.Sprintf("%s (%v)", s.Message, err)
	return s
}

// serve is the handler behind the middleware.
func serve(w http.ResponseWriter, r *http.Request) {
	ctx := r.Context()
	c, ok := ctx.Value(callKey{}).(*call)
	if !ok || c.ran {
		http.Error(w, "no call", http.StatusInternalServerError)
		return
	}
	c.ran = true
	work := ctx
	if claim, ok := driver.ClaimFrom(ctx); ok {
		work = driver.NewContext(ctx, holder{claim, c})
	}
	c.got = c.run(work)
	if c.got.Status != nil && errors.Is(context.Cause(ctx), idempotency.ErrLeaseLost) {
		c.got.Status = exchange.StatusOf(idempotency.ErrLeaseLost) // whatever a cancelled handler returned
	}
	resp, err := c.got.record()
	if err != nil { // the answer cannot be stored
		c.lost = true
		if c.got.Status != nil { // it need not be stored if it is not final
			w.WriteHeader(exchange.HTTPStatus(c.got.Status.GetCode()))
		}
		_ = http.NewResponseController(w).Flush()
		return
	}
	w.Header()[ownMark] = []string{}
	for name, values := range c.got.Header {
		w.Header()[http.CanonicalHeaderKey(name)] = values
	}
	for name, values := range c.got.Trailer {
		w.Header()[trailerPrefix+http.CanonicalHeaderKey(name)] = values
	}
	resp.Send(w)
}

func (a Answer) record() (idempotency.Response, error) {
	if a.Status != nil {
		return answer.OfStatus(a.Status)
	}
	return answer.OfMessage(a.Message)
}

// bypassed returns the header that the middleware adds to the answer of a handler.
func bypassed(head http.Header) http.Header {
	const name = "Idempotency-Bypassed"
	if values := head[name]; values != nil {
		return http.Header{name: values}
	}
	return nil
}

// split returns the part of a header that is for the client.
func split(head http.Header) (header, trailer http.Header) {
	header, trailer = http.Header{}, http.Header{}
	for name, values := range head {
		switch rest, isTrailer := strings.CutPrefix(name, trailerPrefix); {
		case isTrailer:
			trailer[rest] = values
		case name != "Content-Type" && name != "Content-Length" && name != "X-Content-Type-Options":
			header[name] = values
		}
	}
	return header, trailer
}
