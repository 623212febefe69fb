package outboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/internal/trace/lanes"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// unsteady is a store whose calls are sometimes lost, answered in vain, or late. It has a budget of faults of each kind,
// because the time of the check is exponential in the calls without an answer.
type unsteady struct {
	*outboxpgx.Store
	claims, settles, stalls atomic.Int64 // faults left
}

var errUnanswered = errors.New("no answer")

// fault makes a call: usually one in eight has a fault while the budget lasts.
func (u *unsteady) fault(budget *atomic.Int64, call func() error) error {
	if rand.IntN(8) > 0 {
		return call()
	}
	switch rand.IntN(3) {
	case 0:
		if u.stalls.Add(-1) >= 0 {
			time.Sleep(shortLease + shortLease/5) // timing: other relays may take the lanes
		}
	case 1:
		if budget.Add(-1) >= 0 {
			return errUnanswered // the request is lost
		}
	case 2:
		if budget.Add(-1) >= 0 {
			return errors.Join(call(), errUnanswered)
		}
	}
	return call()
}

func (u *unsteady) Claim(ctx context.Context, c driver.Claim) (b driver.Batch, err error) {
	err = u.fault(&u.claims, func() error { b, err = u.Store.Claim(ctx, c); return err })
	if err != nil {
		return driver.Batch{}, err
	}
	return b, nil
}

func (u *unsteady) Settle(ctx context.Context, b driver.Batch, all []driver.Settlement) (s driver.Settled, err error) {
	err = u.fault(&u.settles, func() error { s, err = u.Store.Settle(ctx, b, all); return err })
	return s, err
}

// moody confirms most messages, after a time that may be longer than a quarter of a lease.
type moody struct{ open sync.WaitGroup }

func (p *moody) Publish(_ context.Context, _ driver.Message, done func(error)) {
	p.open.Go(func() {
		time.Sleep(time.Duration(rand.IntN(30)) * time.Millisecond) // timing: other calls come in between
		switch rand.IntN(20) {
		case 0:
			done(&driver.PublishError{Class: driver.Permanent, Err: errors.New("refused")})
		case 1, 2:
			done(&driver.PublishError{Class: driver.Retryable, Err: errors.New("failed")})
		default:
			done(nil)
		}
	})
}

const shortLease = 200 * time.Millisecond

// Three relays with short leases publish while calls are lost or late. Their run is one of the model of lanes.
func TestRelays_runOfTheModel(t *testing.T) {
	t.Parallel()
	f, log, p := setup(t, outboxpgx.Config{}), lanes.New(true), &moody{}
	var relays []*outbox.Relay
	for range 3 {
		source := &unsteady{Store: f.store}
		source.claims.Store(1)
		source.settles.Store(2)
		source.stalls.Store(2)
		process := log.Process()
		to := process.Publisher(p)
		r, err := outbox.NewRelay(process.Source(source), to, outbox.RelayConfig{
			BatchSize: 20, PollInterval: 20 * time.Millisecond, LeaseTTL: shortLease, Logger: quiet,
			Retry: outbox.RetryPolicy{BaseDelay: 20 * time.Millisecond, MaxDelay: 50 * time.Millisecond},
		})
		must(t, err)
		relays = append(relays, r)
	}
	stop := run(t, relays...)
	var writers sync.WaitGroup
	for w := range 4 {
		writers.Go(func() {
			for i := range 15 {
				m := outbox.Message{ID: uuid.Must(uuid.NewV7()), Name: "order.placed", Body: []byte(strconv.Itoa(i))}
				if i%5 > 0 {
					m.Key = fmt.Sprint("key-", w, i%2)
				}
				err := log.Commit(func(begin func(), wrote func(...driver.Message)) error {
					return inManaged(f, t.Context(), func(write write) error {
						begin()
						wrote(driver.Message{ID: m.ID, Key: m.Key})
						return write(m)
					})
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	writers.Wait()
	f.untilEmpty(t, 0)
	stop()
	p.open.Wait()
	t.Log(log.Counts())
	if err := log.Check(); err != nil {
		t.Error(err)
	}
}
