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
	// ReplayedHeader is set to "true" on an answer that is not the first one.
	ReplayedHeader = "Idempotency-Replayed"
	// bypassedHeader is set to "true" on an answer that was made without
	// protection, see MiddlewareConfig.FailOpen.
	bypassedHeader = "Idempotency-Bypassed"
)

// Response is the kept result of one piece of work: what a repeated request is
// answered with.
type Response struct {
	// Status is the HTTP status, 200 to 999.
	Status int
	// Header holds the kept headers; nil is none.
	Header http.Header
	// Body is the kept body; nil is empty.
	Body []byte
}

// JSON makes a response with v encoded as JSON.
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

// Send writes r to w, without the headers that are never given to a later caller.
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
		_, _ = w.Write(r.Body) // a client that went away asks again
	}
}

// bodyAllowed follows RFC 9110: no content with 1xx, 204 and 304.
func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}

// defaultKeepHeaders are the headers that describe the body or point at what
// the request made.
var defaultKeepHeaders = []string{
	"Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language",
	"Content-Type", "Etag", "Last-Modified", "Link", "Location", "X-Content-Type-Options",
}

// keepHeader returns the allowed part of h, which shares its values: h must not be
// changed any more. Names stay as they are spelled, and a name without a value
// stays: with both net/http sends something else than without.
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

// contains looks for a name in a sorted list of canonical ones.
func contains(names []string, name string) bool {
	_, found := slices.BinarySearch(names, http.CanonicalHeaderKey(name))
	return found
}

// recorder holds a handler's response back until it is stored. A response that
// cannot be held (too large, flushed, hijacked) goes straight to the client
// from then on, after spills was called. The header is the one of the
// underlying writer, so that the handler sees what was set before it.
//
// It has no Unwrap on purpose: what it does not know http.ResponseController
// refuses with http.ErrNotSupported.
type recorder struct {
	w       http.ResponseWriter
	keeper  keeper
	outer   http.Header // what was there before the handler
	sent    http.Header // the header as it was at WriteHeader; later changes do not count
	status  int         // 0 until WriteHeader
	length  int64       // of the body, as the handler has declared it; -1: not at all
	written int64       // what the handler has written, or tried to
	body    []byte
	limit   int
	spilled bool
}

type keeper interface {
	// spills is called once, before the first byte leaves that cannot be kept.
	// status is 0 if the connection was hijacked.
	spills(status int)
	// replays reports whether the answer is an earlier run's, whatever the handler writes.
	replays() bool
}

func (rec *recorder) reset(w http.ResponseWriter, limit int, k keeper) {
	rec.w, rec.keeper, rec.limit = w, k, limit
	rec.outer = cloneHeader(w.Header())
}

// cloneHeader makes no map for nothing.
func cloneHeader(h http.Header) http.Header {
	if len(h) == 0 {
		return nil
	}
	return h.Clone()
}

func (rec *recorder) Header() http.Header { return rec.w.Header() }

// WriteHeader drops informational responses: nothing may leave before the
// result is stored. It panics on an invalid status, as that of net/http does.
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

// Write refuses what net/http refuses, so that what is kept is what is sent.
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

// Flush is for http.Flusher; FlushError says more.
func (rec *recorder) Flush() { _ = rec.FlushError() }

// FlushError sends what there is: the handler streams.
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

// canFlush looks for a Flusher as http.ResponseController does, without flushing.
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

// Hijack hands the connection over, where the server can.
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

// spill turns to sending directly.
func (rec *recorder) spill() {
	rec.spilled = true
	rec.keeper.spills(rec.status)
	rec.send()
}

// send writes what was held back, with the header as it was at WriteHeader. What
// was set later is set again at the end: net/http looks for trailers there.
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
		_, _ = rec.w.Write(rec.body) // a client that went away asks again
	}
	rec.body = nil
	maps.Copy(header, late)
}

// rewind removes the handler's headers.
func (rec *recorder) rewind() { replaceHeader(rec.w.Header(), rec.outer) }

func replaceHeader(h, by http.Header) {
	clear(h)
	maps.Copy(h, by)
}

// response is the part of it that is kept; a tombstone if that is too large, or if
// the body is shorter than declared: the client sees that it broke off.
func (rec *recorder) response(headers []string) driver.Response {
	rec.WriteHeader(http.StatusOK)
	resp := driver.Response{Status: rec.status, Header: keepHeader(rec.sent, headers), Body: rec.body}
	short := bodyAllowed(rec.status) && int64(len(rec.body)) < rec.length
	if short || resp.Size() > rec.limit {
		return driver.Response{}
	}
	return resp
}
