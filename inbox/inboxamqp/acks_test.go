package inboxamqp_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

// Of a window that messages in work have nearly filled the last place is free again at once where the
// acknowledgement may not wait.
func TestAcksThatMayNotWait(t *testing.T) {
	t.Parallel()
	const window, more = 4, 50
	b := amqptest.New(t)
	s := open(t, newSource(t, b.Dial, config{}), window)
	numbered(t, b, "orders", 1, window+more)
	last := take(t, s, window)[window-1:]
	shortest := time.Hour
	for range more {
		must(t, s.Ack(t.Context(), last, false))
		began := time.Now()
		last = take(t, s, 1)
		shortest = min(shortest, time.Since(began))
	}
	if shortest > 100*time.Millisecond { // what each would wait at least, on a calm machine too
		t.Errorf("of %d messages none came sooner than %v", more, shortest)
	}
	must(t, s.Close(t.Context()))
}

// Acknowledgements that wait for an earlier message are told when their time is over, when that message goes
// back, and when the session is closed. None of these messages comes again.
func TestAcksThatWait(t *testing.T) {
	t.Parallel()
	const window, acked = 20, 3
	for name, tell := range map[string]func(t *testing.T, s driver.Session, first driver.Delivery){
		"time": func(t *testing.T, s driver.Session, _ driver.Delivery) { take(t, s, 1) }, // the window has no room for it before
		"give back": func(t *testing.T, s driver.Session, first driver.Delivery) {
			must(t, s.GiveBack(t.Context(), []driver.Delivery{first}))
		},
		"close": func(*testing.T, driver.Session, driver.Delivery) {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := amqptest.New(t)
			s := open(t, newSource(t, b.Dial, config{}), window)
			numbered(t, b, "orders", 1, window+1)
			ds := take(t, s, window)
			must(t, s.Ack(t.Context(), ds[1:1+acked], true))
			tell(t, s, ds[0])
			must(t, s.Close(t.Context()))
			awaitDepth(t, b, "orders", window+1-acked)
		})
	}
}
