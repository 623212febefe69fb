package idempotencypgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/txretry"
)

// ErrNotCommitted says that the outcome of a COMMIT was unknown and is known
// now: there is no record, so the transaction was rolled back, and the request
// may be sent again with the same key. Should the lost transaction commit after
// all, the repetition gets its answer.
var ErrNotCommitted = errors.New("idempotencypgx: transaction was not committed")

// errNotKept rolls back the transaction of a response that is not kept.
var errNotKept = errors.New("idempotencypgx: response is not kept")

// RunnerConfig configures a Runner. The zero value is usable.
type RunnerConfig struct {
	// Keep says which statuses are final; the middleware's Keep should agree.
	// nil: idempotency.DefaultKeep.
	Keep func(status int) bool
	// MaxResponseBytes bounds the stored headers and body. A longer response is
	// returned once, and leaves a tombstone: the handler must send it itself, or
	// the first answer is IDEMPOTENCY_RESULT_UNAVAILABLE, too. 0: 1 MiB.
	MaxResponseBytes int
	// ResolveTimeout bounds the search for the record after a failure, which
	// goes on when the caller is gone. 0: 10 s.
	ResolveTimeout time.Duration
}

func (c RunnerConfig) withDefaults() RunnerConfig {
	if c.Keep == nil {
		c.Keep = idempotency.DefaultKeep
	}
	if c.MaxResponseBytes == 0 {
		c.MaxResponseBytes = 1 << 20
	}
	if c.ResolveTimeout == 0 {
		c.ResolveTimeout = 10 * time.Second
	}
	return c
}

func (c RunnerConfig) validate() error {
	var errs []error
	if c.MaxResponseBytes < 0 {
		errs = append(errs, errors.New("idempotencypgx: MaxResponseBytes is negative"))
	}
	if c.ResolveTimeout < 0 {
		errs = append(errs, errors.New("idempotencypgx: ResolveTimeout is negative"))
	}
	return errors.Join(errs...)
}

// Runner runs business transactions that take effect once per key, whatever
// crashes in between: the answer is stored in the transaction itself. It is
// safe for concurrent use.
type Runner struct {
	tx      txretry.Transactor
	records Records
	gate    idempotency.Store
	cfg     RunnerConfig
}

// Func is the work of one business transaction. It may run several times: see
// txretry.Manager.Do. A refusal that is final (such as 409) is a Response too.
type Func func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error)

// NewRunner returns a Runner. records must be in the database of t. gate is the
// store in front, the same that the middleware has; it must not be a Store on
// the table of the records.
func NewRunner(t txretry.Transactor, records Records, gate idempotency.Store, cfg RunnerConfig) (*Runner, error) {
	cfg = cfg.withDefaults()
	err := cfg.validate()
	if t == nil {
		err = errors.Join(err, errors.New("idempotencypgx: transactor is nil"))
	}
	if records == nil {
		err = errors.Join(err, errors.New("idempotencypgx: records is nil"))
	}
	if gate == nil {
		err = errors.Join(err, errors.New("idempotencypgx: gate is nil"))
	}
	table, onTable := records.(*Table)
	store, onStore := gate.(*Store)
	if onTable && onStore && table.table == store.table {
		err = errors.Join(err, fmt.Errorf("idempotencypgx: gate and records are both on table %s: give one of them its own", table.table))
	}
	if err != nil {
		return nil, err
	}
	return &Runner{tx: t, records: records, gate: gate, cfg: cfg}, nil
}

// Run runs fn in a transaction, under the claim that ctx carries, and stores
// its response in the same transaction. It must be called once per claim. In
// the handler of the middleware, whose answer it settles, the caller may leave
// sending the response to the middleware.
//
// A response that Keep releases is returned after the transaction was rolled
// back: the same key may run again, so nothing of this run may remain.
//
// If the key has a record already, fn's transaction is rolled back, and the
// stored response is returned. Errors are those of fn and of txretry, once it
// is certain that there is no record; idempotency.ErrNoClaim, ErrKeyReused,
// ErrResultUnavailable and ErrLeaseLost; and ErrNotCommitted. A *txretry.CommitUnknownError
// remains only where the record could not be asked for. Answer the last two
// with a status that the middleware does not keep, such as 503: the gate would
// replay it although the transaction may be committed.
func (r *Runner) Run(ctx context.Context, fn Func) (idempotency.Response, error) {
	return r.RunWith(ctx, txretry.Options{}, fn)
}

// RunWith is Run with options for the transaction.
func (r *Runner) RunWith(ctx context.Context, opts txretry.Options, fn Func) (idempotency.Response, error) {
	claim, ok := idempotency.ClaimFrom(ctx)
	if !ok {
		return idempotency.Response{}, idempotency.ErrNoClaim
	}
	var resp idempotency.Response
	var rec Record
	err := r.tx.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) (err error) {
		if resp, err = fn(ctx, tx); err != nil {
			return err
		}
		if errors.Is(context.Cause(ctx), idempotency.ErrLeaseLost) {
			return idempotency.ErrLeaseLost // COMMIT itself is not interrupted
		}
		if resp.Unavailable() {
			return fmt.Errorf("idempotencypgx: response has status %d", resp.Status)
		}
		if !r.cfg.Keep(resp.Status) {
			return errNotKept
		}
		rec = r.record(claim, resp)
		return r.records.Insert(ctx, tx, rec)
	})
	if err != nil {
		return r.resolve(ctx, claim, resp, withCause(ctx, err))
	}
	settle(claim, rec)
	return resp, nil
}

// withCause says of a transaction that a lost lease has cancelled what cancelled
// it.
func withCause(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	if !errors.Is(cause, idempotency.ErrLeaseLost) || !errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("%w: %w", cause, err)
}

// RunKey is Run outside HTTP: it takes the claim for key at the gate by itself,
// or does without the gate if that cannot be asked. replayed says that the
// response is an earlier run's. Errors are those of Run and of idempotency.Do.
func (r *Runner) RunKey(ctx context.Context, key idempotency.Key, fp idempotency.Fingerprint, fn Func) (resp idempotency.Response, replayed bool, err error) {
	ran := false
	resp, replayed, err = r.runKey(ctx, r.gate, key, fp, func(ctx context.Context, tx pgx.Tx) (idempotency.Response, error) {
		ran = true
		return fn(ctx, tx)
	})
	if !ran && errors.Is(err, idempotency.ErrStoreUnavailable) {
		return r.runKey(ctx, r.Fallback(), key, fp, fn)
	}
	return resp, replayed, err
}

func (r *Runner) runKey(ctx context.Context, gate idempotency.Store, key idempotency.Key, fp idempotency.Fingerprint, fn Func) (resp idempotency.Response, replayed bool, err error) {
	var released idempotency.Response
	resp, replayed, err = idempotency.Do(ctx, gate, key, fp, func(ctx context.Context) (idempotency.Response, error) {
		resp, err := r.Run(ctx, fn)
		if err == nil && !r.cfg.Keep(resp.Status) {
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

// record is what is stored of resp.
func (r *Runner) record(claim idempotency.Claim, resp idempotency.Response) Record {
	rec := Record{Key: claim.Key, Token: claim.Token, Fingerprint: claim.Fingerprint}
	resp.Header = idempotency.CleanHeader(resp.Header)
	if resp.Size() <= r.cfg.MaxResponseBytes {
		rec.Response = resp
	}
	return rec
}

// resolve finds out what a failed transaction means. Any failure may be the
// echo of an earlier run with the same key, whose answer was lost: its own
// record, or a business rule that its effect now breaks. So the record is asked
// for before the failure is believed.
func (r *Runner) resolve(ctx context.Context, claim idempotency.Claim, resp idempotency.Response, failure error) (idempotency.Response, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.ResolveTimeout)
	defer cancel()
	_, unknown := errors.AsType[*txretry.CommitUnknownError](failure)
	find := r.records.Lookup
	if unknown {
		find = r.records.Resolve
	}
	rec, found, err := find(ctx, claim.Key)
	switch {
	case err != nil && unknown:
		return idempotency.Response{}, fmt.Errorf("%w (and %w)", failure, err)
	case err != nil:
		// The failure itself is not passed on: it may be the echo.
		return idempotency.Response{}, fmt.Errorf("idempotencypgx: after a failed transaction (%v): %w", failure, err)
	case found:
		settle(claim, rec)
		own := unknown && rec.Token == claim.Token
		return answer(claim, rec, resp, own)
	case unknown:
		return idempotency.Response{}, fmt.Errorf("%w: %v", ErrNotCommitted, failure)
	case errors.Is(failure, errNotKept):
		return resp, nil
	}
	return idempotency.Response{}, failure
}

// answer returns the stored response. own says that rec was committed by the
// transaction that made resp.
func answer(claim idempotency.Claim, rec Record, resp idempotency.Response, own bool) (idempotency.Response, error) {
	switch {
	case own:
		return resp, nil
	case claim.Fingerprint.Conflicts(rec.Fingerprint):
		return idempotency.Response{}, idempotency.ErrKeyReused
	case rec.Response.Unavailable():
		return idempotency.Response{}, idempotency.ErrResultUnavailable
	}
	return rec.Response, nil
}

// settle hands the record to whoever began the claim.
func settle(claim idempotency.Claim, rec Record) {
	claim.Settle(rec.outcome(), rec.Token != claim.Token)
}

func (rec Record) outcome() idempotency.Outcome {
	return idempotency.Outcome{State: idempotency.Completed, Fingerprint: rec.Fingerprint, Response: rec.Response}
}
