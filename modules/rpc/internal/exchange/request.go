// Package exchange makes of an RPC the HTTP exchange that it is on the wire, for the
// middlewares of the cores: POST, the procedure as path, the metadata as header. What a
// middleware answers by itself comes back as a status with the standard details.
package exchange

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/url"
	"strings"
)

// OfGRPC reports whether a procedure is one of gRPC's own services, such as health and reflection, which have no side
// effects that a key could protect. Connect serves them under the same names.
func OfGRPC(procedure string) bool { return strings.HasPrefix(procedure, "/grpc.") }

// OfHealth reports whether a procedure is one of the service grpc.health.v1.Health. Who asks it, such as Kubernetes,
// sends no metadata, and ends a server that refuses.
func OfHealth(procedure string) bool { return strings.HasPrefix(procedure, "/grpc.health.") }

// Call is what a middleware gets to know of an RPC.
type Call struct {
	Procedure string      // /package.Service/Method
	Header    http.Header // canonical names
	Host      string      // that the client called; may be empty
	Remote    string      // address of the client; may be empty
	Body      []byte      // the message in its deterministic form; nil where none is there yet
}

// Media is the media type of every call: the protocols differ in theirs, and a call is the
// same call in each of them.
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

// NewWriter returns an empty one.
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

// Flush implements http.Flusher: by it a handler says that its answer cannot be kept.
func (w *Writer) Flush() {}
