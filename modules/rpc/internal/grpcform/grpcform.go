// Package grpcform has the shared code of the interceptors for gRPC.
package grpcform

import (
	"context"
	"errors"
	"net/http"
	"strings"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
)

// About describes a call by its context.
func About(ctx context.Context, procedure string) exchange.Call {
	c := exchange.Call{Procedure: procedure}
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		c.Header = Header(md)
		if hosts := md.Get(":authority"); len(hosts) == 1 {
			c.Host = hosts[0]
		}
	}
	if p, ok := peer.FromContext(ctx); ok && p.Addr != nil {
		c.Remote = p.Addr.String()
	}
	return c
}

// Header converts metadata to an HTTP header.
func Header(md metadata.MD) http.Header {
	h := make(http.Header, len(md))
	for name, values := range md {
		if !strings.HasPrefix(name, ":") {
			h[http.CanonicalHeaderKey(name)] = values
		}
	}
	return h
}

// Metadata converts an HTTP header to metadata.
func Metadata(h http.Header) metadata.MD {
	md := make(metadata.MD, len(h))
	for name, values := range h {
		md[strings.ToLower(name)] = values
	}
	return md
}

// StatusOf returns the status of a handler's error: its own, the one of its code and HTTP
// status, or the default of gRPC.
func StatusOf(err error) *spb.Status {
	if _, ok := errors.AsType[interface {
		error
		GRPCStatus() *status.Status
	}](err); !ok {
		if s := exchange.StatusOf(err); s != nil {
			return s
		}
		return status.FromContextError(err).Proto()
	}
	return status.Convert(err).Proto()
}
