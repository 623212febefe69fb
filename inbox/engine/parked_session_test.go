package engine_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/engine"
	"github.com/holdfast-go/holdfast/inbox/internal/memqueue"
	"github.com/holdfast-go/holdfast/internal/ids"
)

// slowParking takes its time to store a message.
type slowParking struct {
	driver.Parking
	takes time.Duration
}

func (p slowParking) Append(ctx context.Context, key string, m *inbox.Message) error {
	time.Sleep(p.takes)
	return p.Parking.Append(ctx, key, m)
}

// A message is stored with its key while there is no session: the next one has it processed.
func TestParkedBetweenSessions(t *testing.T) {
	bubble(t, func(t *testing.T) {
		y := newYard(t)
		y.fail = func(*inbox.Message) error { return nil }
		y.parking = slowParking{y.parking, 5 * time.Second}
		left := &inbox.Message{ID: ids.New(), Name: "order", Key: "a", Attempt: 1}
		y.number[left.ID] = 1
		if err := y.parking.Append(t.Context(), "a", left); err != nil {
			t.Fatal(err)
		}
		run(t, y.consumer(func(*engine.Config) {}, memqueue.Options{}))
		y.put("a", 2)
		time.Sleep(4990 * time.Millisecond)
		y.queue.Cut() // the next session begins at least 50 ms later
		y.idle()
		time.Sleep(time.Hour)
		if got := y.orderOf("a"); !slices.Equal(got, []int{1, 2}) || len(y.parked()) > 0 {
			t.Errorf("a has done %v, parked %v", got, y.parked())
		}
	})
}
