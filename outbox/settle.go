package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/internal/backoff"
	"github.com/holdfast-go/holdfast/internal/runloop"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

const (
	// settleTimeout is for how long a batch is tried to be settled. That is also for how long a store may
	// be away without anything being published twice, unless another relay takes the lanes when it returns.
	settleTimeout = 30 * time.Second
	// wholeSettles is how often that is tried before the failures are left out.
	wholeSettles = 3
)

// settlement is what the store took of a batch.
type settlement struct {
	stale      []driver.Lease
	unrecorded error // why the failures were left out: their messages were given back
}

// settle tries until it worked: what is not settled is published again. A store that refuses to record
// failures, since its disk is full or one of them is too much for it, may still take what was published,
// and that must not be published again for the sake of the others.
func (r *Relay) settle(ctx context.Context, b driver.Batch, verdicts []driver.Settlement) (settlement, error) {
	between := backoff.Policy{Base: 50 * time.Millisecond, Max: time.Second, Jitter: 0.5}
	end := time.Now().Add(settleTimeout)
	sound := publishedOnly(verdicts)
	for n := 1; ; n++ {
		stale, err := r.trySettle(ctx, b, verdicts)
		if err == nil {
			return settlement{stale: stale}, nil
		}
		r.setLastLook(err)
		if n >= wholeSettles && len(sound) < len(verdicts) {
			if stale, refused := r.trySettle(ctx, b, sound); refused == nil {
				return settlement{stale, fmt.Errorf("record %d failures: %w", len(verdicts)-len(sound), err)}, nil
			}
		}
		delay := between.Delay(n-1, r.cfg.Rand())
		if time.Now().Add(delay).After(end) || runloop.Sleep(ctx, delay) != nil {
			_, _ = r.trySettle(ctx, b, nil) // given back, no message is suspected of having ended a relay
			return settlement{}, fmt.Errorf("settle %d messages: %w", len(verdicts), err)
		}
	}
}

func (r *Relay) trySettle(ctx context.Context, b driver.Batch, verdicts []driver.Settlement) ([]driver.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.storeTimeout())
	defer cancel()
	return r.source.Settle(ctx, b, verdicts)
}

func publishedOnly(verdicts []driver.Settlement) []driver.Settlement {
	sound := make([]driver.Settlement, 0, len(verdicts))
	for _, v := range verdicts {
		if v.Verdict == driver.Published {
			sound = append(sound, v)
		}
	}
	return sound
}
