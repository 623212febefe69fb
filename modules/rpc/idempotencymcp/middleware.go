package idempotencymcp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/answer"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/grpcform"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/once"
)

const (
	argument = "idempotency_key"          // the key as an argument
	prefix   = "io.github.holdfast-go/"   // of our entries in _meta
	keyEntry = prefix + "idempotency-key" // the key in _meta
)

// requestKey is the context key of the call, for the scope.
type requestKey struct{}

// New returns a middleware for mcp.Server.AddReceivingMiddleware that lets each key reach a tool once. scope returns
// the owner of the keys of a call, such as the user of its token; it must not be nil. needs reports whether calls of a
// tool need a key; others pass unchanged. If needs is nil, all tools need one. cfg is as in idempotency.NewMiddleware,
// but Methods, CanonicalJSON and KeepHeaders must be zero, and MaxRequestBytes has no limit by default. The middleware
// is safe for concurrent use.
func New(store driver.Store, scope func(*mcp.CallToolRequest) (string, error), needs func(tool string) bool, cfg idempotency.MiddlewareConfig) (mcp.Middleware, error) {
	if scope == nil || cfg.KeepHeaders != nil {
		return nil, errors.New("idempotencymcp: scope is nil, or KeepHeaders is set: a result has no headers")
	}
	if needs == nil {
		needs = func(string) bool { return true }
	}
	owner := func(r *http.Request) (string, error) {
		return scope(r.Context().Value(requestKey{}).(*mcp.CallToolRequest))
	}
	guard, err := once.New(store, owner, nil, cfg)
	if err != nil {
		return nil, fmt.Errorf("idempotencymcp: %w", err)
	}
	return func(next mcp.MethodHandler) mcp.MethodHandler {
		return func(ctx context.Context, method string, req mcp.Request) (mcp.Result, error) {
			call, ok := req.(*mcp.CallToolRequest)
			if !ok || !needs(call.Params.Name) {
				return next(ctx, method, req)
			}
			return do(ctx, guard, call, func(ctx context.Context) (mcp.Result, error) { return next(ctx, method, req) })
		}
	}, nil
}

func do(ctx context.Context, guard *once.Guard, req *mcp.CallToolRequest, run func(context.Context) (mcp.Result, error)) (mcp.Result, error) {
	about, body := describe(req)
	var own mcp.Result
	var failure error
	a, fresh := guard.Do(context.WithValue(ctx, requestKey{}, req), about, wrapperspb.Bytes(body), func(ctx context.Context) once.Answer {
		own, failure = run(ctx)
		return answerOf(own, failure)
	})
	switch {
	case a.Status != nil && fresh && a.Status.GetCode() == int32(codes.Unknown):
		return own, failure // as it is: it has no code
	case a.Status != nil:
		if !fresh && a.Header.Get(idempotency.ReplayedHeader) == "" { // refused by the middleware for HTTP
			a.Status.Message = strings.Replace(a.Status.GetMessage(), "header "+idempotency.Header, "argument "+argument, 1)
		}
		return mark(failed(a.Status), a.Header), nil
	case fresh && a.Message == nil:
		return failed(&spb.Status{Code: int32(codes.Internal), Message: "The tool has run, but its result cannot be encoded."}), nil
	case fresh:
		return mark(own.(*mcp.CallToolResult), a.Header), nil
	}
	result, err := decode(a)
	if err != nil {
		return failed(exchange.StatusOf(idempotency.ErrResultUnavailable)), nil
	}
	return mark(result, a.Header), nil
}

// describe returns a call as the HTTP request that the middleware sees, and its arguments without the key, in a form
// that is equal for equal arguments.
func describe(req *mcp.CallToolRequest) (exchange.Call, []byte) {
	about := exchange.Call{Procedure: "/" + req.Params.Name, Header: http.Header{}}
	if req.Extra != nil && req.Extra.Header != nil {
		about.Header = req.Extra.Header.Clone()
		about.Header.Del(idempotency.Header) // it is of the transport, whose requests are not the calls
	}
	decoder := json.NewDecoder(bytes.NewReader(req.Params.Arguments))
	decoder.UseNumber()
	args := map[string]any{}
	if err := decoder.Decode(&args); err != nil && len(req.Params.Arguments) > 0 { // no object: no key in it
		addKey(about.Header, req.Params.Meta[keyEntry])
		return about, req.Params.Arguments
	}
	addKey(about.Header, args[argument])
	addKey(about.Header, req.Params.Meta[keyEntry])
	delete(args, argument)
	body, _ := json.Marshal(args) // decoded values can be encoded
	return about, body
}

// addKey adds a key that the call has. Two different ones, or one that is no string, are rejected like two headers.
func addKey(h http.Header, key any) {
	text, ok := key.(string)
	switch {
	case ok && h.Get(idempotency.Header) != text:
		h.Add(idempotency.Header, text)
	case !ok && key != nil:
		h[idempotency.Header] = []string{"", ""}
	}
}

// answerOf returns the answer of a tool in the form that is stored. A failure is one of the code of its error, and
// UNKNOWN if the error has none.
func answerOf(result mcp.Result, err error) once.Answer {
	if err != nil {
		return once.Answer{Status: grpcform.StatusOf(err)}
	}
	own, ok := result.(*mcp.CallToolResult)
	switch {
	case !ok || own == nil || own.InputRequests != nil: // it is no answer yet
		return once.Answer{Status: &spb.Status{Code: int32(codes.Unknown), Message: "The tool has not answered."}}
	case own.IsError && own.GetError() != nil:
		return once.Answer{Status: grpcform.StatusOf(own.GetError())}
	case own.IsError:
		return once.Answer{Status: &spb.Status{Code: int32(codes.Unknown), Message: textOf(own)}}
	}
	encoded, err := json.Marshal(own)
	if err != nil {
		return once.Answer{}
	}
	return once.Answer{Message: wrapperspb.Bytes(encoded)}
}

func textOf(result *mcp.CallToolResult) string {
	var texts []string
	for _, c := range result.Content {
		if text, ok := c.(*mcp.TextContent); ok {
			texts = append(texts, text.Text)
		}
	}
	return strings.Join(texts, "\n")
}

func decode(a once.Answer) (*mcp.CallToolResult, error) {
	encoded, ok := a.Message.(*wrapperspb.BytesValue)
	if !ok {
		return nil, errors.New("the record is not the result of a tool")
	}
	result := &mcp.CallToolResult{}
	var raw struct {
		StructuredContent json.RawMessage `json:"structuredContent"`
	}
	if err := errors.Join(json.Unmarshal(encoded.GetValue(), result), json.Unmarshal(encoded.GetValue(), &raw)); err != nil {
		return nil, err
	}
	if result.StructuredContent != nil {
		result.StructuredContent = raw.StructuredContent // large integers stay exact
	}
	return result, nil
}

// mark adds the header of the middleware, such as Idempotency-Replayed, to _meta.
func mark(result *mcp.CallToolResult, header http.Header) *mcp.CallToolResult {
	marked := *result // a tool may return one result to many calls
	for name := range header {
		if strings.HasPrefix(name, "Idempotency-") {
			marked.Meta = maps.Clone(marked.Meta)
			if marked.Meta == nil {
				marked.Meta = mcp.Meta{}
			}
			marked.Meta[prefix+strings.ToLower(name)] = header.Get(name) == "true"
		}
	}
	return &marked
}

// failed returns a tool error: text for a model, and the status in _meta for programs.
func failed(s *spb.Status) *mcp.CallToolResult {
	s.Message = strings.ToValidUTF8(s.GetMessage(), "\uFFFD")
	text := s.GetMessage()
	for _, packed := range s.GetDetails() {
		detail, _ := packed.UnmarshalNew() // nil if the type is unknown here
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			text = d.GetReason() + ": " + text
		case *errdetails.RetryInfo:
			text += fmt.Sprintf(" Call the tool again in %v, with the same key and arguments.", d.GetRetryDelay().AsDuration().Round(time.Second))
		}
	}
	result := &mcp.CallToolResult{IsError: true, Content: []mcp.Content{&mcp.TextContent{Text: text}}}
	if encoded, err := protojson.Marshal(s); err == nil { // not if a detail is of an unknown type
		result.Meta = mcp.Meta{prefix + "status": json.RawMessage(encoded)}
	}
	return result
}

// Record returns the result of a tool in its stored form, for work that is one transaction (the method Do of
// idempotencypgx.Store):
//
//	return idempotencymcp.Reply(store.Do(ctx, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
//		return idempotencymcp.Record(place(ctx, tx, req))
//	}))
//
// An error with a final code becomes a Response, which commits with the transaction. Every other error is returned as
// it is, and rolls back. So does a result with IsError that has no such error.
func Record(result *mcp.CallToolResult, err error) (idempotency.Response, error) {
	a := answerOf(result, err)
	switch {
	case err == nil && a.Status != nil:
		err = errors.New(a.Status.GetMessage())
	case err == nil:
		return answer.OfMessage(a.Message)
	}
	if exchange.HTTPStatus(a.Status.GetCode()) >= http.StatusInternalServerError {
		return idempotency.Response{}, err
	}
	return answer.OfStatus(a.Status)
}

// Reply returns the result that Record has stored, or err. An error with a final code is returned as an error.
func Reply(kept idempotency.Response, err error) (*mcp.CallToolResult, error) {
	if err != nil {
		return nil, err
	}
	m := &wrapperspb.BytesValue{}
	refused, err := answer.Into(kept, m)
	switch {
	case err != nil:
		return nil, fmt.Errorf("idempotencymcp: %w", err)
	case refused != nil:
		return nil, status.FromProto(refused).Err()
	}
	return decode(once.Answer{Message: m})
}
