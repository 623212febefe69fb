package txretrytest

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast/txretry"
)

// Rehearsal is a Transactor that runs every fn several times, as a conflict
// would: all runs but the last are rolled back after fn has succeeded. Test code
// with it, on the fake or on a real database, to find what breaks only when fn
// is repeated: effects that are not the transaction's, and captured variables
// that a second run finds as the first one left them.
type Rehearsal struct {
	inner txretry.Transactor
	runs  int
}

// defaultAttempts are left to the failures of a call that does not say.
const defaultAttempts = 6

// NewRehearsal returns a Transactor that runs every fn of inner runs times; at
// least 2. The retries are those of inner, delays included.
func NewRehearsal(inner txretry.Transactor, runs int) (*Rehearsal, error) {
	var errs []error
	if inner == nil {
		errs = append(errs, errors.New("txretrytest: NewRehearsal: inner is nil"))
	}
	if runs < 2 {
		errs = append(errs, fmt.Errorf("txretrytest: NewRehearsal: runs is %d, must be at least 2", runs))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return &Rehearsal{inner: inner, runs: runs}, nil
}

// Do is Do of the inner Transactor, with fn run several times.
func (r *Rehearsal) Do(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	return r.DoWith(ctx, txretry.Options{}, fn)
}

// DoWith is DoWith of the inner Transactor, with fn run several times. The forced
// runs do not count against opts.MaxAttempts; 0 means 6 here. What is nested in a
// rehearsed call is repeated together with it.
func (r *Rehearsal) DoWith(ctx context.Context, opts txretry.Options, fn func(ctx context.Context, tx pgx.Tx) error) error {
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
type rehearsing struct{ r *Rehearsal }

func rehearsed() error {
	return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: "40001", Message: "rolled back for a rehearsal by txretrytest"}
}
