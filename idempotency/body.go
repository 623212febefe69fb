package idempotency

import (
	"bytes"
	"errors"
	"io"
	"net/http"
)

// body gives a request's body, which was read whole, to the handler.
type body struct{ bytes.Reader }

func (*body) Close() error { return nil }

// trustedLength is how much of a declared length is taken for true before the
// bytes are there.
const trustedLength = 64 << 10

// readBody reads the whole body, of at most limit bytes.
func readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	if r.ContentLength > limit {
		return nil, errBodyTooLarge
	}
	size := r.ContentLength + 1 // room to see the end
	if size <= 0 {
		size = bytes.MinRead
	}
	data := make([]byte, 0, min(size, trustedLength))
	for {
		if len(data) == cap(data) {
			data = append(data, 0)[:len(data)]
		}
		room := data[len(data):cap(data)]
		if left := limit - int64(len(data)); int64(len(room)) > left {
			room = room[:left]
		}
		if len(room) == 0 {
			return data, atEnd(w, r.Body)
		}
		n, err := r.Body.Read(room)
		data = data[:len(data)+n]
		if errors.Is(err, io.EOF) {
			return data, nil
		}
		if err != nil {
			return nil, unread(err)
		}
	}
}

// atEnd returns nil if nothing is left of a body. A server closes the connection
// when something is: MaxBytesReader tells it to.
func atEnd(w http.ResponseWriter, rest io.ReadCloser) error {
	_, err := http.MaxBytesReader(w, rest, 0).Read(make([]byte, 1))
	if errors.Is(err, io.EOF) {
		return nil
	}
	return unread(err)
}

// unread says why a body was not read to its end. The limit may be one that
// stands around the middleware.
func unread(err error) error {
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		return errBodyTooLarge
	}
	return errBodyUnreadable
}
