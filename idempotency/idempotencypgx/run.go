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

// ErrNotCommitted says that the outcome of a COMMIT was unknown and is known
// now: there is no record, so the transaction was rolled back, and the request
// may be sent again with the same key. Should the lost transaction commit after
// all, the repetition gets its answer. 503 NOT_COMMITTED.
var ErrNotCommitted error = &problem.Error{
	Text: "idempotencypgx: transaction was not committed",
	Problem: problem.Problem{
		Status: http.StatusServiceUnavailable, Code: "NOT_COMMITTED",
		Detail: "Nothing was done. Try again with the same Idempotency-Key.", RetryAfter: time.Second,
	},
}

// errNotKept rolls back the transaction of a response that is not kept.
var errNotKept = errors.New("idempotencypgx: response is not kept")

// What rolls back a transaction whose key is not free.
var (
	errTaken = errors.New("idempotencypgx: another transaction holds the key")
	errDone  = errors.New("idempotencypgx: the key has a record")
)

const (
	// resolveTimeout bounds the search for the record after a failure, which goes on
	// when the caller is gone.
	resolveTimeout = 10 * time.Second
	// takenPause is after which time a client asks again whose key is in a transaction.
	takenPause = time.Second
)

// Do runs fn in a transaction, under the claim that ctx carries, and stores
// its response in the same transaction. It must be called once per claim. In
// the handler of the middleware, whose answer it settles, the caller may leave
// sending the response to the middleware.
//
// fn may run several times: see txretry.Manager.Do. A refusal that is final (such as
// 409) is a Response too. Which statuses are final, and how long a response may be,
// is the middleware's to say (Keep, MaxResponseBytes). A response that is not kept is
// returned after the transaction was rolled back: the same key may run again, so
// nothing of this run may remain. One that is too large is returned once and leaves a
// tombstone.
//
// If the key has a record already, fn's transaction is rolled back, and the
// stored response is returned. Errors are those of fn and of txretry, once it
// is certain that there is no record; idempotency.ErrNoClaim, ErrKeyInUse, ErrKeyReused,
// ErrResultUnavailable, ErrLeaseLost and ErrStoreUnavailable (the database was not to be
// had, for BEGIN or for the record); and ErrNotCommitted. A *txretry.CommitUnknownError
// remains only where the record could not be asked for. Answer the last two
// with a status that the middleware does not keep, such as 503: it would
// replay it although the transaction may be committed.
func (s *Store) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)) (idempotency.Response, error) {
	return s.DoWith(ctx, txretry.Options{}, fn)
}

// errSavepoint refuses what would answer before the outer transaction commits, which may
// yet be rolled back.
var errSavepoint = errors.New("idempotencypgx: Options.Savepoint: the answer needs a transaction of its own")

// DoWith is Do with options for the transaction. With AtBegin the key is not claimed
// together with BEGIN: of two requests at once both run, and one commits. Savepoint is
// refused.
func (s *Store) DoWith(ctx context.Context, o txretry.Options, fn func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)) (idempotency.Response, error) {
	resp, _, err := s.do(ctx, o, false, fn)
	return resp, err
}

// do is DoWith that also returns whether the response is one that is kept. With looks the transaction looks for a
// record first; without it that was done before.
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

// opening is what a transaction learns of its key when it begins.
type opening struct {
	record pgxdriver.Record
	found  bool // record is the key's
	locked bool // no other transaction has the key
	taken  bool // one was refused because another one has it
	begun  bool // one has begun, or may have failed on an earlier effect before it could
}

// opening has the transaction claim the key together with BEGIN, where nothing in front of
// the records does. The claim is an advisory lock that ends with the transaction. With looks
// it looks for the record first. One that commits between the look and the lock is not seen:
// the records' primary key stops a second effect.
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

// refusal returns why the work must not run in a transaction that has begun.
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

// checkStatus refuses what would be a tombstone, which fn never means.
func checkStatus(resp idempotency.Response) error {
	if driver.Response(resp).Unavailable() {
		return fmt.Errorf("idempotencypgx: response has status %d", resp.Status)
	}
	return nil
}

// withCause says of a transaction that a lost lease has cancelled what cancelled
// it.
func withCause(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	if !errors.Is(cause, driver.ErrLeaseLost) || !errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("%w: %w", cause, err)
}

// DoKey is Do outside HTTP: it takes the claim for key by itself, or does without the
// gate if that cannot be asked. request says what the call asks for: the same key with
// other words is idempotency.ErrKeyReused. nil: the key alone. replayed says that the
// response is an earlier run's; with an error it is false. An error of fn frees the key, whatever its status. Errors are those of Do and of idempotency.Do.
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

// resolve finds out what a failed transaction means. Any failure may be the
// echo of an earlier run with the same key, whose answer was lost: its own
// record, or a business rule that its effect now breaks. So the record is asked
// for before the failure is believed.
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

// known answers from a record that was there before.
func known(claim driver.Claim, rec pgxdriver.Record) (resp idempotency.Response, final bool, err error) {
	settle(claim, rec)
	resp, err = stored(claim, rec, idempotency.Response{}, false)
	return resp, true, err
}

// inUse has the middleware answer that another transaction holds the key.
func inUse(claim driver.Claim) error {
	claim.Settle(driver.BeginResult{State: driver.InProgress, Lease: takenPause}, true)
	return fmt.Errorf("%w: %w", idempotency.ErrKeyInUse, errTaken)
}

// notBegun says of a transaction that never began that nothing was done. Such a failure is
// no echo.
func (s *Store) notBegun(claim driver.Claim, failure error) error {
	if s.table != nil {
		failure = s.table.asker.missing.Explain(failure)
	}
	if _, ok := errors.AsType[*txretry.UnavailableError](failure); ok {
		return unavailable(claim, failure)
	}
	return failure
}

// unasked says of a failed transaction that err keeps from being resolved. The failure itself is not
// passed on: it may be the echo.
func unasked(claim driver.Claim, failure, err error) error {
	code := sqlstate.Of(err)
	err = fmt.Errorf("idempotencypgx: after a failed transaction (%v): %w", failure, err)
	if strings.HasPrefix(code, "42") || strings.HasPrefix(code, "3F") {
		return err // a table or a right is missing, which no repetition mends
	}
	return unavailable(claim, err)
}

// unavailable refuses the work for want of the store, and has whoever began the claim count it so.
func unavailable(claim driver.Claim, err error) error {
	claim.MarkUnavailable()
	return fmt.Errorf("%w: %w", idempotency.ErrStoreUnavailable, err)
}

// stored returns the stored response. own says that rec was committed by the
// transaction that made resp.
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

// settle hands the record to whoever began the claim.
func settle(claim driver.Claim, rec pgxdriver.Record) {
	claim.Settle(completed(rec), rec.Token != claim.Token)
}

func completed(rec pgxdriver.Record) driver.BeginResult {
	return driver.BeginResult{State: driver.Completed, Fingerprint: rec.Fingerprint, Response: rec.Response}
}

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
