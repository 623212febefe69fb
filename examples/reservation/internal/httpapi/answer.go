package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/booking"
	"github.com/holdfast-go/holdfast/idempotency"
)

// statusOf has the HTTP status of each rejection of the domain.
var statusOf = map[booking.Code]int{
	booking.CodeInvalidRequest:     http.StatusBadRequest,
	booking.CodeNotFound:           http.StatusNotFound,
	booking.CodeNotYours:           http.StatusForbidden,
	booking.CodeSeatsUnavailable:   http.StatusConflict,
	booking.CodeReservationNotHeld: http.StatusConflict,
	booking.CodeReservationExpired: http.StatusConflict,
}

// useCase runs in a transaction and returns the view of its result.
type useCase func(ctx context.Context, w booking.Work) (view any, err error)

// once answers a request with a use case that takes effect once.
func (a *api) once(w http.ResponseWriter, r *http.Request, eventID string, status int, use useCase) {
	resp, err := a.backend.Once(r.Context(), eventID, func(ctx context.Context, work booking.Work) (idempotency.Response, error) {
		view, err := use(ctx, work)
		if refusal, ok := keptRefusal(err); ok {
			return refusal, nil
		}
		if err != nil {
			return idempotency.Response{}, err
		}
		return jsonResponse(status, "application/json", encode(view)), nil
	})
	if err != nil {
		a.fail(w, r, err)
		return
	}
	resp.Send(w)
}

// keptRefusal converts a rejection that only time can change to a response. A repeated
// request with the same key gets the same answer.
func keptRefusal(err error) (idempotency.Response, bool) {
	refusal, ok := errors.AsType[*booking.Error](err)
	if !ok {
		return idempotency.Response{}, false
	}
	p := problemOf(refusal)
	kept := p.Status == http.StatusConflict || p.Status == http.StatusForbidden
	return jsonResponse(p.Status, problemType, p.body()), kept
}

func problemOf(refusal *booking.Error) problem {
	return newProblem(statusOf[refusal.Code], string(refusal.Code), refusal.Detail)
}

func jsonResponse(status int, contentType string, body []byte) idempotency.Response {
	header := http.Header{"Content-Type": {contentType}, "Cache-Control": {"no-store"}}
	return idempotency.Response{Status: status, Header: header, Body: body}
}

// show answers a GET.
func (a *api) show(w http.ResponseWriter, r *http.Request, view any, err error) {
	if err != nil {
		a.fail(w, r, err)
		return
	}
	jsonResponse(http.StatusOK, "application/json", encode(view)).Send(w)
}

// coded is implemented by the errors of the libraries that have an HTTP answer, such as *txretry.LockTimeoutError.
type coded interface {
	error
	Code() string
	HTTPStatus() int
	RetryAfter() time.Duration
}

// fail answers a request that failed.
func (a *api) fail(w http.ResponseWriter, r *http.Request, err error) {
	if p, ok := errors.AsType[problemError](err); ok {
		p.write(w)
		return
	}
	if refusal, ok := errors.AsType[*booking.Error](err); ok {
		problemOf(refusal).write(w)
		return
	}
	p := newProblem(http.StatusServiceUnavailable, codeUnavailable, "the shop cannot answer now")
	p.retryAfter = time.Second
	if known, ok := errors.AsType[coded](err); ok {
		p.Status, p.Code, p.retryAfter = known.HTTPStatus(), known.Code(), known.RetryAfter()
	}
	if p.Code == codeLockTimeout {
		p.Detail = "too many concurrent requests for the same"
	}
	if !errors.Is(r.Context().Err(), context.Canceled) { // otherwise the client left, which is no fault
		a.log.write(r.Context(), slog.LevelError, "request failed", p.Code,
			slog.String("code", p.Code), slog.String("path", r.URL.Path), slog.Any("error", err))
	}
	p.write(w)
}

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
	_, _ = w.Write(p.body()) // the client may have left
}

// problemError is a problem as an error.
type problemError struct{ problem }

func (e problemError) Error() string { return "httpapi: " + e.Code + ": " + e.Detail }

func invalid(detail string) error {
	return problemError{newProblem(http.StatusBadRequest, "INVALID_REQUEST", detail)}
}
