package idempotency

import (
	"bufio"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
)

const (
	// ReplayedHeader is set to "true" on a replayed answer.
	ReplayedHeader = "Idempotency-Replayed"
	// bypassedHeader is set to "true" on an answer made without protection, see MiddlewareConfig.FailOpen.
	bypassedHeader = "Idempotency-Bypassed"
)

// Response is the kept result of one piece of work, and the answer to repeated requests.
type Response struct {
	// Status is the HTTP status, 200 to 999.
	Status int
	// Header holds the kept headers; nil means none.
	Header http.Header
	// Body is the kept body; nil means empty.
	Body []byte
}

// JSON returns a response with v encoded as JSON.
func JSON(status int, v any) (Response, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return Response{}, fmt.Errorf("idempotency: encode response: %w", err)
	}
	return Response{
		Status: status,
		Header: http.Header{"Content-Type": {"application/json"}},
		Body:   body,
	}, nil
}

// Send writes r to w, without the headers that must never be replayed.
func (r Response) Send(w http.ResponseWriter) {
	header := w.Header()
	for name, values := range r.Header {
		if !headers.Denied(name) {
			header[name] = slices.Clone(values)
		}
	}
	if bodyAllowed(r.Status) {
		header.Set("Content-Length", strconv.Itoa(len(r.Body)))
	}
	w.WriteHeader(r.Status)
	if bodyAllowed(r.Status) {
		_, _ = w.Write(r.Body) // a client that disconnected repeats the request
	}
}

// bodyAllowed follows RFC 9110: no content with 1xx, 204 and 304.
func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}

// defaultKeepHeaders are the headers that describe the body or point at the resource that the request created.
var defaultKeepHeaders = []string{
	"Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language",
	"Content-Type", "Etag", "Last-Modified", "Link", "Location", "X-Content-Type-Options",
}

// keepHeader returns the allowed part of h. It shares the values, so h must not be changed afterwards. Names keep
// their spelling, and a name without values stays, because net/http sends a different answer without it.
func keepHeader(h http.Header, allowed []string) http.Header {
	kept := 0
	for name := range h {
		if contains(allowed, name) {
			kept++
		}
	}
	if kept == len(h) {
		return h
	}
	out := make(http.Header, kept)
	for name, values := range h {
		if contains(allowed, name) {
			out[name] = values
		}
	}
	return out
}

// contains reports whether name is in a sorted list of canonical names.
func contains(names []string, name string) bool {
	_, found := slices.BinarySearch(names, http.CanonicalHeaderKey(name))
	return found
}

// recorder buffers a handler's response until it is stored. A response that cannot be buffered (too large, flushed,
// hijacked) goes directly to the client from then on, after a call of spills. The header is the header of the
// underlying writer, so that the handler sees the values set before it.
//
// recorder deliberately has no Unwrap: http.ResponseController then returns http.ErrNotSupported for unknown methods.
type recorder struct {
	w       http.ResponseWriter
	keeper  keeper
	outer   http.Header // the header before the handler ran
	sent    http.Header // the header as it was at WriteHeader; later changes do not count
	status  int         // 0 until WriteHeader
	length  int64       // the Content-Length that the handler declared; -1: none
	written int64       // bytes that the handler has written or tried to write
	body    []byte
	limit   int
	spilled bool
}

type keeper interface {
	// spills is called once, before the first byte of a response that cannot be kept is sent. status is 0 if the
	// connection was hijacked.
	spills(status int)
	// replays reports whether the answer comes from an earlier run, so that the handler's output is dropped.
	replays() bool
}

func (rec *recorder) reset(w http.ResponseWriter, limit int, k keeper) {
	rec.w, rec.keeper, rec.limit = w, k, limit
	rec.outer = cloneHeader(w.Header())
}

// cloneHeader returns nil for an empty header, to save an allocation.
func cloneHeader(h http.Header) http.Header {
	if len(h) == 0 {
		return nil
	}
	return h.Clone()
}

func (rec *recorder) Header() http.Header { return rec.w.Header() }

// WriteHeader drops informational responses, because nothing may be sent before the result is stored. It panics on an
// invalid status, as net/http does.
func (rec *recorder) WriteHeader(status int) {
	if rec.status != 0 || rec.hijacked() {
		return
	}
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("idempotency: invalid WriteHeader code %d", status))
	}
	if status < 200 && status != http.StatusSwitchingProtocols {
		return
	}
	rec.status, rec.sent = status, cloneHeader(rec.w.Header())
	rec.length = declaredLength(rec.sent)
}

// declaredLength reads the Content-Length as net/http does: -1 if it is invalid.
func declaredLength(h http.Header) int64 {
	if len(h["Content-Length"]) == 0 {
		return -1
	}
	n, err := strconv.ParseInt(h["Content-Length"][0], 10, 64)
	if err != nil || n < 0 {
		return -1
	}
	return n
}

func (rec *recorder) hijacked() bool { return rec.spilled && rec.status == 0 }

// Write rejects everything that net/http rejects, so that the kept response equals the sent one.
func (rec *recorder) Write(p []byte) (int, error) {
	rec.WriteHeader(http.StatusOK)
	switch {
	case rec.hijacked():
		return rec.w.Write(p)
	case len(p) == 0:
		return 0, nil
	case !bodyAllowed(rec.status):
		return 0, http.ErrBodyNotAllowed
	}
	rec.written += int64(len(p))
	if rec.length >= 0 && rec.written > rec.length {
		return 0, http.ErrContentLength
	}
	if !rec.spilled && rec.keeper.replays() {
		return len(p), nil
	}
	if !rec.spilled && len(rec.body)+len(p) > rec.limit {
		rec.spill()
	}
	if rec.spilled {
		return rec.w.Write(p)
	}
	rec.body = append(rec.body, p...)
	return len(p), nil
}

// Flush implements http.Flusher; FlushError also returns the error.
func (rec *recorder) Flush() { _ = rec.FlushError() }

// FlushError sends the buffered bytes and streams the rest of the response.
func (rec *recorder) FlushError() error {
	if !canFlush(rec.w) {
		return fmt.Errorf("idempotency: flush: %w", http.ErrNotSupported)
	}
	rec.WriteHeader(http.StatusOK)
	if !rec.spilled {
		rec.spill()
	}
	return http.NewResponseController(rec.w).Flush()
}

// canFlush searches for a Flusher as http.ResponseController does, without flushing.
func canFlush(w http.ResponseWriter) bool {
	for {
		switch t := w.(type) {
		case interface{ FlushError() error }, http.Flusher:
			return true
		case interface{ Unwrap() http.ResponseWriter }:
			w = t.Unwrap()
		default:
			return false
		}
	}
}

// Hijack takes over the connection, if the server supports it.
func (rec *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(rec.w).Hijack()
	if err == nil && !rec.spilled {
		rec.spilled = true
		rec.keeper.spills(0)
	}
	return conn, rw, err
}

// SetReadDeadline, SetWriteDeadline and EnableFullDuplex configure the connection;
// they do not change the response.
func (rec *recorder) SetReadDeadline(t time.Time) error {
	return http.NewResponseController(rec.w).SetReadDeadline(t)
}

// SetWriteDeadline: see SetReadDeadline.
func (rec *recorder) SetWriteDeadline(t time.Time) error {
	return http.NewResponseController(rec.w).SetWriteDeadline(t)
}

// EnableFullDuplex: see SetReadDeadline.
func (rec *recorder) EnableFullDuplex() error {
	return http.NewResponseController(rec.w).EnableFullDuplex()
}

// spill switches to sending directly.
func (rec *recorder) spill() {
	rec.spilled = true
	rec.keeper.spills(rec.status)
	rec.send()
}

// send writes the buffered response, with the header as it was at WriteHeader. Headers set later are restored at the
// end, because net/http looks for trailers there.
func (rec *recorder) send() {
	rec.WriteHeader(http.StatusOK)
	header := rec.w.Header()
	var late http.Header
	if !maps.EqualFunc(header, rec.sent, slices.Equal) {
		late = header.Clone()
		replaceHeader(header, rec.sent)
	}
	rec.w.WriteHeader(rec.status)
	if len(rec.body) > 0 {
		_, _ = rec.w.Write(rec.body) // a client that disconnected repeats the request
	}
	rec.body = nil
	maps.Copy(header, late)
}

// rewind restores the header as it was before the handler.
func (rec *recorder) rewind() { replaceHeader(rec.w.Header(), rec.outer) }

func replaceHeader(h, by http.Header) {
	clear(h)
	maps.Copy(h, by)
}

// response returns the part of the response to keep. It is a tombstone if that part is too large, or if the body is
// shorter than declared, because the client sees an incomplete body.
func (rec *recorder) response(headers []string) driver.Response {
	rec.WriteHeader(http.StatusOK)
	resp := driver.Response{Status: rec.status, Header: keepHeader(rec.sent, headers), Body: rec.body}
	short := bodyAllowed(rec.status) && int64(len(rec.body)) < rec.length
	if short || resp.Size() > rec.limit {
		return driver.Response{}
	}
	return resp
}
