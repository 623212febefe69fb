package idempotencypgx

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	pgxdriver "github.com/holdfast-go/holdfast/idempotency/idempotencypgx/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/inctx"
	"github.com/holdfast-go/holdfast/internal/problem"
	"github.com/holdfast-go/holdfast/internal/sqlstate"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// ErrNotCommitted means that the outcome of a COMMIT was unknown, and that the search found no record: the
// transaction was rolled back, and the request may be repeated with the same key. If the lost transaction commits
// later, the repetition gets its answer. 503 NOT_COMMITTED.
var ErrNotCommitted error = &problem.Error{
	Text: "idempotencypgx: transaction was not committed",
	Problem: problem.Problem{
		Status: http.StatusServiceUnavailable, Code: "NOT_COMMITTED",
		Detail: "Nothing was done. Try again with the same Idempotency-Key.", RetryAfter: time.Second,
	},
}

// errNotKept rolls back a transaction whose response is not kept.
var errNotKept = errors.New("idempotencypgx: response is not kept")

// Errors that roll back a transaction whose key is not free.
var (
	errTaken = errors.New("idempotencypgx: another transaction holds the key")
	errDone  = errors.New("idempotencypgx: the key has a record")
)

const (
	// resolveTimeout limits the search for the record after a failure. The search continues when the caller has
	// disconnected.
	resolveTimeout = 10 * time.Second
	// takenPause is the RetryAfter for a key that is in a transaction.
	takenPause = time.Second
)

// Do runs fn in a transaction, under the claim in ctx, and stores its response in the same transaction. It must be
// called once per claim. In a handler behind the middleware, it settles the answer, so the handler may leave sending
// the response to the middleware.
//
// fn may run several times: see txretry.Manager.Do. Return a final rejection (such as 409) as a Response. The
// middleware's Keep and MaxResponseBytes decide which statuses are final, and how long a response may be. If a
// response is not kept, the transaction is rolled back before Do returns the response: the same key may run again, so
// no effect of this run may remain. A response that is too large is returned once and leaves a tombstone.
//
// If the key already has a record, fn's transaction is rolled back, and Do returns the stored response. Do returns
// the errors of fn and of txretry only when it is certain that there is no record. Other errors:
// idempotency.ErrNoClaim, ErrKeyInUse, ErrKeyReused, ErrResultUnavailable, ErrLeaseLost, ErrStoreUnavailable (the
// database was unreachable for BEGIN or for the record) and ErrNotCommitted. A *txretry.CommitUnknownError is
// returned only if the record could not be read. Answer ErrNotCommitted and CommitUnknownError with a status that the
// middleware does not keep, such as 503. Otherwise it would replay the failure although the transaction may be
// committed.
func (s *Store) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)) (idempotency.Response, error) {
	return s.DoWith(ctx, txretry.Options{}, fn)
}

// errSavepoint rejects Options.Savepoint: the answer would be sent before the outer transaction commits, and that
// transaction may be rolled back.
var errSavepoint = errors.New("idempotencypgx: Options.Savepoint is set: the answer needs its own transaction")

// DoWith is Do with options for the transaction. With AtBegin the key is not claimed together with BEGIN: two
// concurrent requests both run, and one commits. Savepoint is rejected.
func (s *Store) DoWith(ctx context.Context, o txretry.Options, fn func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)) (idempotency.Response, error) {
	resp, _, err := s.do(ctx, o, false, fn)
	return resp, err
}

// do is DoWith that also returns whether the response is kept. With looks the transaction looks for a record first;
// without it the caller has done that.
func (s *Store) do(ctx context.Context, o txretry.Options, looks bool, fn func(context.Context, pgx.Tx) (idempotency.Response, error)) (resp idempotency.Response, final bool, err error) {
	claim, ok := driver.ClaimFrom(ctx)
	if !ok {
		return idempotency.Response{}, false, idempotency.ErrNoClaim
	}
	if o.Savepoint {
		return idempotency.Response{}, false, errSavepoint
	}
	o, at := s.opening(claim.Key, o, looks)
	var rec pgxdriver.Record
	err = s.tx.DoWith(ctx, o, func(ctx context.Context, tx pgx.Tx) (err error) {
		if err := at.refusal(); err != nil {
			return err
		}
		if resp, err = fn(ctx, tx); err != nil {
			return err
		}
		if errors.Is(context.Cause(ctx), driver.ErrLeaseLost) {
			return driver.ErrLeaseLost // COMMIT itself is not interrupted
		}
		if err := checkStatus(resp); err != nil {
			return err
		}
		rec = pgxdriver.Record{Key: claim.Key, Token: claim.Token, Fingerprint: claim.Fingerprint}
		if rec.Response, final = claim.Keeps(driver.Response(resp)); !final {
			return errNotKept
		}
		return s.records.Insert(ctx, tx, rec)
	})
	switch {
	case at.found:
		return known(claim, at.record)
	case at.taken:
		return idempotency.Response{}, false, inUse(claim)
	case err != nil && !at.begun:
		return idempotency.Response{}, false, s.notBegun(claim, err)
	case err != nil:
		return s.resolve(ctx, claim, resp, withCause(ctx, err))
	}
	settle(claim, rec)
	s.written()
	return resp, true, nil
}

// opening is the state of the key as found when the transaction began.
type opening struct {
	record pgxdriver.Record
	found  bool // record is the record of the key
	locked bool // no other transaction has the key
	taken  bool // the work was rejected because another transaction has the key
	begun  bool // the transaction has begun, or its BEGIN may have failed on an earlier effect
}

// opening makes the transaction claim the key together with BEGIN, unless a store in front of the records does that.
// The claim is an advisory lock that ends with the transaction. With looks it looks for the record first. A record
// that commits between the look and the lock is not seen, but the primary key of the records stops a second effect.
func (s *Store) opening(key driver.Key, o txretry.Options, looks bool) (txretry.Options, *opening) {
	if !s.claimsAtBegin || o.AtBegin.SQL != "" {
		return o, &opening{locked: true, begun: o.AtBegin.SQL != ""}
	}
	at := &opening{}
	o.AtBegin = txdriver.Statement{
		SQL:  `SELECT WHERE pg_try_advisory_xact_lock(hashtextextended($1, 0))`,
		Args: []any{"idempotencypgx " + s.table.name + " " + string(key)},
		Done: func(tag pgconn.CommandTag) { at.locked = tag.RowsAffected() == 1 },
	}
	if looks {
		o.AtBegin.Look = &txdriver.Look{SQL: s.table.find, Args: []any{string(key)}, Read: func(row pgx.Row) (err error) {
			at.record, at.found, err = recordOf(key, row)
			s.expected.set(at.found)
			return err
		}}
	}
	return o, at
}

// refusal returns the reason why the work must not run in the transaction that has begun.
func (at *opening) refusal() error {
	at.begun = true
	switch {
	case at.found:
		return errDone
	case !at.locked:
		at.taken = true
		return errTaken
	}
	return nil
}

// checkStatus rejects a status that would make a tombstone; fn never means that.
func checkStatus(resp idempotency.Response) error {
	if driver.Response(resp).Unavailable() {
		return fmt.Errorf("idempotencypgx: response has status %d", resp.Status)
	}
	return nil
}

// withCause adds ErrLeaseLost to the error of a transaction cancelled by a lost lease.
func withCause(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	if !errors.Is(cause, driver.ErrLeaseLost) || !errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("%w: %w", cause, err)
}

// DoKey is Do outside HTTP. It makes the claim for key itself, and works without the gate while the gate is
// unavailable. request describes the call: the same key with a different request is idempotency.ErrKeyReused. With a
// nil request only the key counts. replayed means that the response comes from an earlier run; with an error it is
// false. An error of fn frees the key, whatever its status. The errors are those of Do and of idempotency.Do.
func (s *Store) DoKey(ctx context.Context, key idempotency.Key, request []string, fn func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)) (resp idempotency.Response, replayed bool, err error) {
	var released idempotency.Response
	resp, replayed, err = idempotency.Do(ctx, s.claimingAtBegin(), key, request, func(ctx context.Context) (idempotency.Response, error) {
		resp, final, err := s.do(ctx, txretry.Options{}, true, fn)
		if err == nil && !final {
			released = resp
			return resp, errNotKept
		}
		return resp, err
	})
	if errors.Is(err, errNotKept) {
		return released, false, nil
	}
	return resp, replayed, err
}

// resolve finds the answer after a failed transaction. The cause of a failure may be an earlier run with the same key
// whose answer was lost: its record, or its effect, which now violates a business rule. So resolve looks for the
// record before it returns the failure.
func (s *Store) resolve(ctx context.Context, claim driver.Claim, resp idempotency.Response, failure error) (_ idempotency.Response, final bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), resolveTimeout)
	defer cancel()
	var none idempotency.Response
	_, unknown := errors.AsType[*txretry.CommitUnknownError](failure)
	find := s.records.Lookup
	if unknown {
		find = s.records.Resolve
	}
	rec, found, err := find(ctx, claim.Key)
	switch {
	case err != nil && unknown:
		return none, false, fmt.Errorf("%w (and %w)", failure, err)
	case err != nil:
		return none, false, unasked(claim, failure, err)
	case found:
		settle(claim, rec)
		own := unknown && rec.Token == claim.Token
		resp, err = stored(claim, rec, resp, own)
		return resp, true, err
	case unknown:
		return none, false, fmt.Errorf("%w: %v", ErrNotCommitted, failure)
	case errors.Is(failure, errNotKept):
		return resp, false, nil
	}
	return none, false, failure
}

// known answers from a record of an earlier run.
func known(claim driver.Claim, rec pgxdriver.Record) (resp idempotency.Response, final bool, err error) {
	settle(claim, rec)
	resp, err = stored(claim, rec, idempotency.Response{}, false)
	return resp, true, err
}

// inUse makes the middleware answer that another transaction holds the key.
func inUse(claim driver.Claim) error {
	claim.Settle(driver.BeginResult{State: driver.InProgress, Lease: takenPause}, true)
	return fmt.Errorf("%w: %w", idempotency.ErrKeyInUse, errTaken)
}

// notBegun returns the error of a transaction that never began. Nothing was done, and an earlier run cannot be the
// cause.
func (s *Store) notBegun(claim driver.Claim, failure error) error {
	if s.table != nil {
		failure = s.table.asker.missing.Explain(failure)
	}
	if _, ok := errors.AsType[*txretry.UnavailableError](failure); ok {
		return unavailable(claim, failure)
	}
	return failure
}

// unasked returns the error of a failed transaction whose record could not be read because of err. The failure itself
// is not wrapped, because an earlier run may have caused it.
func unasked(claim driver.Claim, failure, err error) error {
	code := sqlstate.Of(err)
	err = fmt.Errorf("idempotencypgx: after a failed transaction (%v): %w", failure, err)
	if strings.HasPrefix(code, "42") || strings.HasPrefix(code, "3F") {
		return err // a table or a permission is missing; a retry does not help
	}
	return unavailable(claim, err)
}

// unavailable rejects the work because the store is unreachable, and marks the claim for the metrics.
func unavailable(claim driver.Claim, err error) error {
	claim.MarkUnavailable()
	return fmt.Errorf("%w: %w", idempotency.ErrStoreUnavailable, err)
}

// stored returns the stored response. own means that the transaction that made resp committed rec.
func stored(claim driver.Claim, rec pgxdriver.Record, resp idempotency.Response, own bool) (idempotency.Response, error) {
	switch {
	case own:
		return resp, nil
	case claim.Fingerprint.Conflicts(rec.Fingerprint):
		return idempotency.Response{}, idempotency.ErrKeyReused
	case rec.Response.Unavailable():
		return idempotency.Response{}, idempotency.ErrResultUnavailable
	}
	return idempotency.Response(rec.Response), nil
}

// settle passes the record to the holder of the claim.
func settle(claim driver.Claim, rec pgxdriver.Record) {
	claim.Settle(completed(rec), rec.Token != claim.Token)
}

func completed(rec pgxdriver.Record) driver.BeginResult {
	return driver.BeginResult{State: driver.Completed, Fingerprint: rec.Fingerprint, Response: rec.Response}
}

// Handler returns a handler for requests whose work is one transaction. It calls Do and answers the client. Put it
// behind the middleware of this store: without the middleware every request gets 500.
//
// With Postgres alone, the transaction itself claims the key. The middleware must be directly around this handler. If
// another handler is between them, the middleware costs one SELECT more.
//
// work may run several times. Each time it gets a fresh r, with the body from its start. An error with the methods
// Code() string and HTTPStatus() int, 400 to 599 (and, if waiting helps, RetryAfter() time.Duration), is answered
// with them. Any other error is answered with 500 and logged; an unavailable database is also logged. In all cases
// the transaction is rolled back. The status of the answer decides whether it is kept for replays, as for a Response:
// by default a 409 is kept, a 503 is not.
//
// A request that the middleware passes without a key (no key, or a method that needs none) is one transaction and
// leaves no record. The middleware's MaxRequestBytes and Keep also apply: a response that would not be kept rolls the
// transaction back.
//
// The transaction has the name of the request's Pattern in spans, metrics and logs, such as "POST /orders".
func (s *Store) Handler(work func(ctx context.Context, tx pgx.Tx, r *http.Request) (idempotency.Response, error)) http.Handler {
	return &handler{s, work}
}

type handler struct {
	s    *Store
	work func(context.Context, pgx.Tx, *http.Request) (idempotency.Response, error)
}

// StoreFor implements driver.Claimer: nothing is claimed before the transaction.
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
	opts := txretry.Options{Name: r.Pattern}
	if !claimed {
		return h.s.unprotected(r.Context(), opts, passed.Keep, run)
	}
	resp, _, err := h.s.do(r.Context(), opts, true, run)
	return resp, err
}

// unprotected runs a transaction without a key.
func (s *Store) unprotected(ctx context.Context, opts txretry.Options, keep func(status int) bool, fn func(context.Context, pgx.Tx) (idempotency.Response, error)) (resp idempotency.Response, err error) {
	err = s.tx.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) (err error) {
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

// readBody reads the body, which the middleware has limited.
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
	if !answers && r.Context().Err() == nil { // an ended context is no fault: timed out or disconnected
		s.log(r.Context(), "idempotencypgx: request failed", err)
	}
	p.Document(inctx.Documentation(r.Context()))
	problem.Write(w, p)
}
