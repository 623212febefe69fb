package txretry

import (
	"errors"
	"fmt"
	"sync"
)

// RetryBudget bounds the retries of a manager in proportion to its calls, so
// that a database in trouble is not asked for a multiple of the usual work. It
// is a bucket of tokens: every call puts Ratio tokens in, every retry takes one
// out, before it waits. A retry that finds none is not made, and Do returns a
// *[LockTimeoutError] that is [ErrBudgetSpent]. The zero value sets no bound.
type RetryBudget struct {
	// Ratio is how many retries a call may cause on the average, such as 0.2; 0
	// means that there is no budget.
	Ratio float64

	// Burst is how many tokens the bucket holds, and begins with; 0 means 10.
	Burst int
}

// ErrBudgetSpent is why a *LockTimeoutError came before all attempts were used:
// Config.RetryBudget had no retry left.
var ErrBudgetSpent = errors.New("txretry: retry budget spent")

func (b RetryBudget) withDefaults() RetryBudget {
	if b.Ratio != 0 && b.Burst == 0 {
		b.Burst = 10
	}
	return b
}

func (b RetryBudget) validate() error {
	var errs []error
	if !(b.Ratio >= 0) {
		errs = append(errs, fmt.Errorf("txretry: Config.RetryBudget.Ratio is %v, must not be negative", b.Ratio))
	}
	if b.Burst < 0 {
		errs = append(errs, fmt.Errorf("txretry: Config.RetryBudget.Burst is %d, must not be negative", b.Burst))
	}
	if b.Ratio == 0 && b.Burst > 0 {
		errs = append(errs, errors.New("txretry: Config.RetryBudget.Burst needs a Ratio"))
	}
	return errors.Join(errs...)
}

// bucket is a RetryBudget at work.
type bucket struct {
	budget RetryBudget

	mu     sync.Mutex
	tokens float64
}

func newBucket(b RetryBudget) *bucket {
	return &bucket{budget: b, tokens: float64(b.Burst)}
}

// deposit is made by every call.
func (b *bucket) deposit() {
	if b.budget.Ratio == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tokens = min(b.tokens+b.budget.Ratio, float64(b.budget.Burst))
}

// take takes the token of one retry, if there is one.
func (b *bucket) take() bool {
	if b.budget.Ratio == 0 {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}
