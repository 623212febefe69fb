package httpapi

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"
)

// Codes of the HTTP side; the domain and the libraries have their own.
const (
	codeUserRequired     = "USER_REQUIRED"
	codeMethodNotAllowed = "METHOD_NOT_ALLOWED"
	codeMediaType        = "UNSUPPORTED_MEDIA_TYPE"
	codeTooLarge         = "REQUEST_TOO_LARGE"
	codeUnavailable      = "UNAVAILABLE"
	codeLockTimeout      = "LOCK_TIMEOUT"
)

const problemType = "application/problem+json"

// problem is an error answer by RFC 9457 with the member code.
type problem struct {
	Type   string `json:"type"`
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail,omitempty"`
	Code   string `json:"code"`

	retryAfter time.Duration
}

func newProblem(status int, code, detail string) problem {
	return problem{Type: "about:blank", Title: http.StatusText(status), Status: status, Detail: detail, Code: code}
}

func (p problem) body() []byte {
	body, err := json.Marshal(p)
	if err != nil {
		panic(err) // strings and a number: cannot happen
	}
	return append(body, '\n')
}

func (p problem) write(w http.ResponseWriter) {
	h := w.Header()
	h.Set("Content-Type", problemType)
	h.Set("Cache-Control", "no-store")
	if p.retryAfter > 0 {
		seconds := (p.retryAfter + time.Second - 1) / time.Second
		h.Set("Retry-After", strconv.FormatInt(int64(seconds), 10))
	}
	w.WriteHeader(p.Status)
	_, _ = w.Write(p.body()) // the client may have gone; nobody is left to tell
}

// problemError lets a problem travel as an error to where it is written.
type problemError struct{ problem }

func (e problemError) Error() string { return "httpapi: " + e.Code + ": " + e.Detail }

func invalid(detail string) error {
	return problemError{newProblem(http.StatusBadRequest, "INVALID_REQUEST", detail)}
}
