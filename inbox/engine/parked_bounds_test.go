package engine_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// countingParking counts the messages that were read and not deleted.
type countingParking struct {
	driver.Parking
	out, most *atomic.Int32
}

func (p countingParking) Claim(ctx context.Context, key string, l driver.Lease) (*inbox.Message, bool, error) {
	m, there, err := p.Parking.Claim(ctx, key, l)
	if m != nil {
		p.most.Store(max(p.out.Add(1), p.most.Load()))
	}
	return m, there, err
}

func (p countingParking) Done(ctx context.Context, owner uuid.UUID, m *inbox.Message) error {
	p.out.Add(-1)
	return p.Parking.Done(ctx, owner, m)
}

// However many keys go on at once, no more of their messages are in memory than the prefetch, and all
// keys have their turn soon.
func TestParkedKeysThatGoOnAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const keys, each, window = 300, 2, 10
		y := newYard(t)
		y.fail = func(*inbox.Message) error { return nil }
		counting := countingParking{y.parking, new(atomic.Int32), new(atomic.Int32)}
		y.parking = counting
		for n := range keys * each {
			m := &inbox.Message{ID: ids.New(), Name: "order", Key: fmt.Sprint(n % keys), Attempt: 1}
			y.number[m.ID] = n
			if err := y.parking.Append(t.Context(), m.Key, m); err != nil {
				t.Fatal(err)
			}
		}
		run(t, y.consumer(func(cfg *engine.Config) { cfg.Prefetch = window }, memqueue.Options{}))
		y.put("other", 1)
		time.Sleep(10 * time.Second)
		if left := y.parked(); len(left) > 0 {
			t.Errorf("%d keys are left", len(left))
		}
		if most := counting.most.Load(); most > window {
			t.Errorf("%d messages were in memory, want at most %d", most, window)
		}
	})
}

// hangingParking answers no question about keys until the call is given up.
type hangingParking struct{ driver.Parking }

func (hangingParking) Heads(ctx context.Context, _ string, _ int) ([]driver.Head, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A stop does not wait for the keys to be read.
func TestStopWhileParkedKeysAreNotRead(t *testing.T) {
	bubble(t, func(t *testing.T) {
		y := newYard(t)
		y.fail = func(*inbox.Message) error { return nil }
		y.parking = hangingParking{y.parking}
		stop := run(t, y.consumer(func(cfg *engine.Config) { cfg.ShutdownTimeout = time.Minute }, memqueue.Options{}))
		y.put("a", 1)
		time.Sleep(time.Second)
		began := time.Now()
		stop()
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the stop took %v", took)
		}
	})
}
