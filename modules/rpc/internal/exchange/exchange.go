// Package exchange converts an RPC to its HTTP exchange on the wire, for the middlewares of
// the cores: POST, the procedure as path, the metadata as header. The answers of a middleware
// come back as a status with the standard details.
package exchange

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/holdfast-go/holdfast/internal/problem"
)

// OfGRPC reports whether a procedure is one of gRPC's own services, such as health and reflection, which have no side
// effects that a key could protect. Connect serves them under the same names.
func OfGRPC(procedure string) bool { return strings.HasPrefix(procedure, "/grpc.") }

// OfHealth reports whether a procedure is one of the service grpc.health.v1.Health. Its clients, such as Kubernetes,
// send no metadata, and end a server that rejects them.
func OfHealth(procedure string) bool { return strings.HasPrefix(procedure, "/grpc.health.") }

// Call is an RPC as a middleware sees it.
type Call struct {
	Procedure string      // /package.Service/Method
	Header    http.Header // canonical names
	Host      string      // called by the client; may be empty
	Remote    string      // address of the client; may be empty
	Body      []byte      // the message in its deterministic form; nil if there is none yet
}

// Media is the media type of every call. The protocols use different ones, but a call is the
// same over each of them.
const Media = "application/proto"

// Request returns c as a request.
func (c Call) Request(ctx context.Context) *http.Request {
	header := c.Header.Clone()
	if header == nil {
		header = http.Header{}
	}
	header.Set("Content-Type", Media)
	r := &http.Request{
		Method: http.MethodPost, URL: &url.URL{Path: c.Procedure}, RequestURI: c.Procedure,
		Proto: "HTTP/2.0", ProtoMajor: 2, Header: header, Host: c.Host, RemoteAddr: c.Remote,
		Body: io.NopCloser(bytes.NewReader(c.Body)), ContentLength: int64(len(c.Body)),
	}
	return r.WithContext(ctx)
}

// Writer is the http.ResponseWriter of a call. It is not safe for concurrent use.
type Writer struct {
	Head   http.Header
	Status int // 0: nothing was written
	Body   []byte
}

// NewWriter returns an empty Writer.
func NewWriter() *Writer { return &Writer{Head: http.Header{}} }

// Header implements http.ResponseWriter.
func (w *Writer) Header() http.Header { return w.Head }

// WriteHeader implements http.ResponseWriter.
func (w *Writer) WriteHeader(status int) {
	if w.Status == 0 {
		w.Status = status
	}
}

// Write implements http.ResponseWriter.
func (w *Writer) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	w.Body = append(w.Body, p...)
	return len(p), nil
}

// Flush implements http.Flusher. A handler calls it if its answer cannot be stored.
func (w *Writer) Flush() {}

// Domain is the domain of every ErrorInfo.
const Domain = "github.com/holdfast-go/holdfast"

// httpOf is the HTTP status of an answer with a code. Codes that a repeated call may change have
// statuses that are not stored by default.
var httpOf = map[code.Code]int{
	code.Code_OK:                  http.StatusOK,
	code.Code_CANCELLED:           http.StatusServiceUnavailable,
	code.Code_UNKNOWN:             http.StatusInternalServerError,
	code.Code_INVALID_ARGUMENT:    http.StatusBadRequest,
	code.Code_DEADLINE_EXCEEDED:   http.StatusGatewayTimeout,
	code.Code_NOT_FOUND:           http.StatusNotFound,
	code.Code_ALREADY_EXISTS:      http.StatusConflict,
	code.Code_PERMISSION_DENIED:   http.StatusForbidden,
	code.Code_RESOURCE_EXHAUSTED:  http.StatusTooManyRequests,
	code.Code_FAILED_PRECONDITION: http.StatusPreconditionFailed,
	code.Code_ABORTED:             http.StatusServiceUnavailable,
	code.Code_OUT_OF_RANGE:        http.StatusRequestedRangeNotSatisfiable,
	code.Code_UNIMPLEMENTED:       http.StatusNotImplemented,
	code.Code_INTERNAL:            http.StatusInternalServerError,
	code.Code_UNAVAILABLE:         http.StatusServiceUnavailable,
	code.Code_DATA_LOSS:           http.StatusInternalServerError,
	code.Code_UNAUTHENTICATED:     http.StatusUnauthorized,
}

// HTTPStatus returns the HTTP status for a code.
func HTTPStatus(c int32) int {
	if status, ok := httpOf[code.Code(c)]; ok {
		return status
	}
	return http.StatusInternalServerError
}

// byReason has the codes of problems whose word is more precise than their HTTP status.
var byReason = map[string]code.Code{
	"IDEMPOTENCY_KEY_IN_USE":         code.Code_ABORTED,
	"IDEMPOTENCY_KEY_REUSED":         code.Code_FAILED_PRECONDITION,
	"IDEMPOTENCY_RESULT_UNAVAILABLE": code.Code_ALREADY_EXISTS,
}

// byStatus has the codes of other problems, by HTTP status. Each code is as final as its status
// is by default, so that an error is stored over both HTTP and RPC, or over neither. So a user's
// conflict is no ABORTED, which asks to try again.
var byStatus = map[int]code.Code{
	http.StatusBadRequest:            code.Code_INVALID_ARGUMENT,
	http.StatusUnauthorized:          code.Code_UNAUTHENTICATED,
	http.StatusForbidden:             code.Code_PERMISSION_DENIED,
	http.StatusNotFound:              code.Code_NOT_FOUND,
	http.StatusPreconditionFailed:    code.Code_FAILED_PRECONDITION,
	http.StatusRequestTimeout:        code.Code_DEADLINE_EXCEEDED,
	http.StatusRequestEntityTooLarge: code.Code_INVALID_ARGUMENT,
	http.StatusUnprocessableEntity:   code.Code_INVALID_ARGUMENT,
	http.StatusTooEarly:              code.Code_UNAVAILABLE,
	http.StatusTooManyRequests:       code.Code_RESOURCE_EXHAUSTED,
	http.StatusNotImplemented:        code.Code_UNIMPLEMENTED,
	http.StatusServiceUnavailable:    code.Code_UNAVAILABLE,
	http.StatusGatewayTimeout:        code.Code_DEADLINE_EXCEEDED,
}

func codeOf(status int, reason string) code.Code {
	if known, ok := byReason[reason]; ok {
		return known
	}
	if known, ok := byStatus[status]; ok {
		return known
	}
	if status < http.StatusInternalServerError {
		return code.Code_FAILED_PRECONDITION
	}
	return code.Code_INTERNAL
}

// Refusal returns the answer that a middleware has given by itself. It is nil if there is none.
func (w *Writer) Refusal() *spb.Status {
	if w.Head.Get("Content-Type") != "application/problem+json" {
		return nil
	}
	var told struct {
		Type, Title, Detail, Code string
		Policies                  []string `json:"violated-policies"`
	}
	if err := json.Unmarshal(w.Body, &told); err != nil {
		return &spb.Status{Code: int32(code.Code_INTERNAL), Message: "the refusal is unreadable"}
	}
	seconds, _ := strconv.ParseInt(w.Head.Get("Retry-After"), 10, 64) // there may be none
	p := problem.Problem{Type: told.Type, Status: w.Status, Code: told.Code, Title: told.Title, Detail: told.Detail, RetryAfter: time.Duration(seconds) * time.Second}
	return statusOf(p, told.Policies)
}

// StatusOf returns the status of an error that has a code and an HTTP status. It is nil for every
// other error.
func StatusOf(err error) *spb.Status {
	p, known := problem.Of(err)
	if !known {
		return nil
	}
	return statusOf(p, nil)
}

func statusOf(p problem.Problem, violated []string) *spb.Status {
	s := &spb.Status{Code: int32(codeOf(p.Status, p.Code)), Message: p.Detail}
	if s.Message == "" {
		s.Message = p.Title
	}
	if s.Message == "" {
		s.Message = http.StatusText(p.Status)
	}
	details := []proto.Message{&errdetails.ErrorInfo{Reason: p.Code, Domain: Domain}}
	if p.RetryAfter > 0 {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(p.RetryAfter)})
	}
	if len(violated) > 0 {
		quota := &errdetails.QuotaFailure{}
		for _, limit := range violated {
			quota.Violations = append(quota.Violations, &errdetails.QuotaFailure_Violation{Subject: limit, Description: "This limit is used up."})
		}
		details = append(details, quota)
	}
	if p.Type != "" && p.Type != "about:blank" {
		details = append(details, &errdetails.Help{Links: []*errdetails.Help_Link{{Description: "Meaning of " + p.Code, Url: p.Type}}})
	}
	var errs []error
	for _, d := range details {
		packed, err := anypb.New(d)
		errs = append(errs, err)
		s.Details = append(s.Details, packed)
	}
	if err := errors.Join(errs...); err != nil { // only a text that is not UTF-8
		return &spb.Status{Code: s.Code, Message: http.StatusText(p.Status)}
	}
	return s
}
