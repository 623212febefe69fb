package idempotency

import (
	"bufio"
	"fmt"
	"maps"
	"net"
	"net/http"
)

// recorder holds a handler's response back until it is stored. A response that
// cannot be held (too large, flushed, hijacked) goes straight to the client
// from then on, after onSpill was told.
//
// It has no Unwrap on purpose: what it does not know, such as deadlines of the
// connection, http.ResponseController refuses with http.ErrNotSupported.
type recorder struct {
	w       http.ResponseWriter
	header  http.Header // the handler's
	sent    http.Header // header as it was at WriteHeader; later changes do not count
	status  int         // 0 until WriteHeader
	body    []byte
	limit   int
	spilled bool
	// onSpill runs once, before the first byte leaves. status is 0 if the
	// connection was hijacked.
	onSpill func(status int)
}

func newRecorder(w http.ResponseWriter, limit int, onSpill func(status int)) *recorder {
	return &recorder{w: w, header: make(http.Header), limit: limit, onSpill: onSpill}
}

func (rec *recorder) Header() http.Header { return rec.header }

// WriteHeader drops informational responses: nothing may leave before the
// result is stored. Like that of net/http it panics on what is no status.
func (rec *recorder) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("idempotency: invalid WriteHeader code %d", status))
	}
	if status < 200 && status != http.StatusSwitchingProtocols {
		return
	}
	if rec.status != 0 {
		return
	}
	rec.status, rec.sent = status, rec.header.Clone()
}

func (rec *recorder) Write(p []byte) (int, error) {
	rec.WriteHeader(http.StatusOK)
	if !rec.spilled && !bodyAllowed(rec.status) {
		return 0, http.ErrBodyNotAllowed
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
	rec.WriteHeader(http.StatusOK)
	if !rec.spilled {
		rec.spill()
	}
	return http.NewResponseController(rec.w).Flush()
}

// Hijack hands the connection over, where the server can.
func (rec *recorder) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(rec.w).Hijack()
	if err == nil && !rec.spilled {
		rec.spilled = true
		rec.onSpill(0)
	}
	return conn, rw, err
}

// spill turns to sending directly.
func (rec *recorder) spill() {
	rec.spilled = true
	rec.onSpill(rec.status)
	rec.send()
}

// send writes what was held back. It is not called twice.
func (rec *recorder) send() {
	rec.WriteHeader(http.StatusOK)
	maps.Copy(rec.w.Header(), rec.sent)
	rec.w.WriteHeader(rec.status)
	if len(rec.body) > 0 {
		_, _ = rec.w.Write(rec.body) // a client that went away asks again
	}
	rec.body = nil
}

// finish sends what is left when the handler has returned: everything, unless
// it went already, and the trailers, which net/http looks for at the end.
func (rec *recorder) finish() {
	if !rec.spilled {
		rec.send()
	}
	maps.Copy(rec.w.Header(), rec.header)
}

// response is the part of it that is kept.
func (rec *recorder) response(headers []string) Response {
	rec.WriteHeader(http.StatusOK)
	return Response{Status: rec.status, Header: keepHeader(rec.sent, headers), Body: rec.body}
}
