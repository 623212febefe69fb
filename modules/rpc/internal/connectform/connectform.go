// Package connectform has the shared code of the interceptors for Connect.
package connectform

import (
	"context"
	"errors"
	"maps"
	"net/http"

	"connectrpc.com/connect"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
)

// About describes a call at its start.
func About(spec connect.Spec, peer connect.Peer, header http.Header) exchange.Call {
	return exchange.Call{Procedure: spec.Procedure, Header: header, Host: header.Get("Host"), Remote: peer.Addr}
}

// typeURL is the prefix of the types of packed messages.
const typeURL = "type.googleapis.com/"

// StatusOf returns the status of a handler's error: its own, the one of its code and HTTP
// status, or the default of Connect.
func StatusOf(err error) *spb.Status {
	own, ok := errors.AsType[*connect.Error](err)
	if !ok {
		if s := exchange.StatusOf(err); s != nil {
			return s
		}
		return &spb.Status{Code: int32(codeOf(err)), Message: err.Error()}
	}
	s := &spb.Status{Code: int32(own.Code()), Message: own.Message()}
	for _, d := range own.Details() {
		s.Details = append(s.Details, &anypb.Any{TypeUrl: typeURL + d.Type(), Value: d.Bytes()})
	}
	return s
}

func codeOf(err error) connect.Code {
	switch {
	case errors.Is(err, context.Canceled):
		return connect.CodeCanceled
	case errors.Is(err, context.DeadlineExceeded):
		return connect.CodeDeadlineExceeded
	}
	return connect.CodeUnknown
}

// Error returns a status as an error.
func Error(s *spb.Status) *connect.Error {
	err := connect.NewError(connect.Code(s.GetCode()), errors.New(s.GetMessage()))
	for _, packed := range s.GetDetails() {
		if d, detailErr := connect.NewErrorDetail(packed); detailErr == nil {
			err.AddDetail(d)
		}
	}
	return err
}

// Send adds metadata to the answer of the call of ctx, whether it fails or not. It does not
// change an error, because a handler may return one error to many calls.
func Send(ctx context.Context, header, trailer http.Header) {
	if info, ok := connect.CallInfoForHandlerContext(ctx); ok {
		maps.Copy(info.ResponseHeader(), header)
		maps.Copy(info.ResponseTrailer(), trailer)
	}
}

// Sent returns the metadata of an answer, from the call of ctx and from its response or
// error.
func Sent(ctx context.Context, resp connect.AnyResponse, failure error) (header, trailer http.Header) {
	header, trailer = http.Header{}, http.Header{}
	if info, ok := connect.CallInfoForHandlerContext(ctx); ok {
		maps.Copy(header, info.ResponseHeader())
		maps.Copy(trailer, info.ResponseTrailer())
	}
	if own, ok := errors.AsType[*connect.Error](failure); ok {
		lent := *own // Meta writes into an error that many calls may share
		maps.Copy(header, lent.Meta())
	} else if resp != nil && failure == nil {
		maps.Copy(header, resp.Header())
		maps.Copy(trailer, resp.Trailer())
	}
	return header, trailer
}
