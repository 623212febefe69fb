// Package connectform is what the interceptors for Connect share.
package connectform

import (
	"context"
	"errors"
	"net/http"

	"connectrpc.com/connect"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/holdfast-go/holdfast/rpc/internal/exchange"
)

// About returns what is known of a call when it begins.
func About(spec connect.Spec, peer connect.Peer, header http.Header) exchange.Call {
	return exchange.Call{Procedure: spec.Procedure, Header: header, Host: header.Get("Host"), Remote: peer.Addr}
}

// typeURL begins the types of packed messages.
const typeURL = "type.googleapis.com/"

// StatusOf returns the status of a handler's error: its own, that of its code and HTTP
// status, or what Connect makes of it.
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

// Error returns a status as an error, with the header as its metadata.
func Error(s *spb.Status, header http.Header) *connect.Error {
	err := connect.NewError(connect.Code(s.GetCode()), errors.New(s.GetMessage()))
	for _, packed := range s.GetDetails() {
		if d, detailErr := connect.NewErrorDetail(packed); detailErr == nil {
			err.AddDetail(d)
		}
	}
	Add(err.Meta(), header)
	return err
}

// Add sets each value of more in h.
func Add(h, more http.Header) {
	for name, values := range more {
		h[name] = values
	}
}
