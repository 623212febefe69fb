package idempotencypgx

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/inctx"
	"github.com/holdfast-go/holdfast/internal/problem"
	"github.com/holdfast-go/holdfast/txretry"
)

// Handler returns the handler of requests whose work is one transaction: Do, and the
// answer to the client. Put it behind the middleware of this store: without it every
// request gets 500.
//
// Where Postgres alone decides, the transaction itself asks for the key. The middleware must
// be right around this handler: with another one between them it asks first, by a SELECT.
//
// work may run several times; r is then a fresh one each time, with the body from its
// start. An error that has the methods Code() string and HTTPStatus() int, 400 to 599
// (and, if waiting helps, RetryAfter() time.Duration), is answered with them, any other
// with a 500 and a line in the log, which an unavailable database has as well. In both
// cases the transaction is rolled back. Whether the answer is kept for repetitions is decided by
// its status alone, as that of a Response is: by default a 409 is, a 503 is not.
//
// A request that the middleware lets pass, since it has no key or its method needs none,
// is one transaction and leaves no record. The middleware's MaxRequestBytes and Keep hold
// for it, too: a response that would not be kept rolls the transaction back.
func (s *Store) Handler(work func(ctx context.Context, tx pgx.Tx, r *http.Request) (idempotency.Response, error)) http.Handler {
	return &handler{s, work}
}

type handler struct {
	s    *Store
	work func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error)
}

// StoreFor implements driver.Claimer: nothing happens before the transaction.
func (h *handler) StoreFor(store driver.Store) driver.Store {
	if store == driver.Store(h.s) {
		return h.s.claimingAtBegin()
	}
	return store
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resp, err := h.answer(w, r)
	if err != nil {
		h.s.fail(w, r, err)
		return
	}
	resp.Send(w)
}

func (h *handler) answer(w http.ResponseWriter, r *http.Request) (idempotency.Response, error) {
	_, claimed := driver.ClaimFrom(r.Context())
	passed, _ := r.Context().Value(inctx.PassedKey{}).(*inctx.Passed)
	switch {
	case claimed: // the middleware has read the body
	case passed == nil:
		return idempotency.Response{}, idempotency.ErrNoClaim
	case r.Body != nil && r.Body != http.NoBody:
		r.Body = http.MaxBytesReader(w, r.Body, passed.MaxRequestBytes)
	}
	body, err := readBody(r)
	if err != nil {
		return idempotency.Response{}, err
	}
	run := func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		fresh := r.WithContext(ctx)
		fresh.Body = io.NopCloser(bytes.NewReader(body))
		return h.work(ctx, tx, fresh)
	}
	if !claimed {
		return h.s.unprotected(r.Context(), passed.Keep, run)
	}
	resp, _, err := h.s.do(r.Context(), txretry.Options{}, true, run)
	return resp, err
}

// unprotected is a transaction without a key.
func (s *Store) unprotected(ctx context.Context, keep func(status int) bool, fn func(context.Context, pgx.Tx) (idempotency.Response, error)) (resp idempotency.Response, err error) {
	err = s.tx.Do(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		if resp, err = fn(ctx, tx); err != nil {
			return err
		}
		if err := checkStatus(resp); err != nil {
			return err
		}
		if !keep(resp.Status) {
			return errNotKept
		}
		return nil
	})
	if errors.Is(err, errNotKept) {
		err = nil
	}
	return resp, err
}

// readBody reads what the middleware has bounded.
func readBody(r *http.Request) ([]byte, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return nil, nil
	}
	body, err := io.ReadAll(r.Body)
	if err == nil {
		return body, nil
	}
	p := problem.Problem{Status: http.StatusBadRequest, Code: "INVALID_REQUEST", Detail: "The request body could not be read."}
	if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
		p = problem.Problem{Status: http.StatusRequestEntityTooLarge, Code: "REQUEST_TOO_LARGE"}
	}
	return nil, &problem.Error{Text: "idempotencypgx: request body is unreadable", Problem: p}
}

func (s *Store) fail(w http.ResponseWriter, r *http.Request, err error) {
	p, known := problem.Of(err)
	answers := known && !errors.Is(err, idempotency.ErrStoreUnavailable)
	if !answers && r.Context().Err() == nil { // else its time is over, or the client has gone, which is no fault
		s.log(r.Context(), "idempotencypgx: request failed", err)
	}
	p.Document(inctx.Documentation(r.Context()))
	problem.Write(w, p)
}
