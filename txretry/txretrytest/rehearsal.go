package txretrytest

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry"
)

// defaultAttempts are left to the failures of a call that does not say.
const defaultAttempts = 6

// Rehearse returns a Transactor that runs every function given to t that many times, as conflicts
// would: all runs but the last are rolled back after the function has succeeded. Test code with it, on
// the fake or on a real database, to find what breaks only when a function is repeated: effects that
// are not the transaction's, and captured variables that a second run finds as the first one left them.
//
// The retries are those of t, delays included. The repetitions do not count against
// Options.MaxAttempts; 0 means 6 here. A nested call is repeated together with the outer one. Rehearse
// panics if t is nil or runs is below 2.
func Rehearse(t txretry.Transactor, runs int) txretry.Transactor {
	var errs []error
	if t == nil {
		errs = append(errs, errors.New("txretrytest: Rehearse: t is nil"))
	}
	if runs < 2 {
		errs = append(errs, fmt.Errorf("txretrytest: Rehearse: runs is %d, must be at least 2", runs))
	}
	if err := errors.Join(errs...); err != nil {
		panic(err)
	}
	return &rehearsal{inner: t, runs: runs}
}

type rehearsal struct {
	inner txretry.Transactor
	runs  int
}

func (r *rehearsal) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return r.DoWith(ctx, txretry.Options{}, fn)
}

func (r *rehearsal) DoWith(ctx context.Context, opts txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
	if fn == nil || ctx.Value(rehearsing{r}) != nil {
		return r.inner.DoWith(ctx, opts, fn)
	}
	if opts.MaxAttempts == 0 {
		opts.MaxAttempts = defaultAttempts
	}
	if opts.MaxAttempts > 0 {
		opts.MaxAttempts += r.runs - 1
	}
	done := 0
	return r.inner.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		if err := fn(context.WithValue(ctx, rehearsing{r}, true), tx); err != nil {
			return err
		}
		if done++; done < r.runs {
			return rehearsed()
		}
		return nil
	})
}

// rehearsing is the context key that marks what is nested in a rehearsed call.
type rehearsing struct{ r *rehearsal }

func rehearsed() error {
	return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "40001", Message: "rolled back for a rehearsal by txretrytest"}
}
