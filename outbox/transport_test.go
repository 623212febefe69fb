package outbox_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// connected is a Publisher that reports its reconnects.
type connected struct {
	*outboxtest.Publisher
	mu        sync.Mutex
	listeners map[*func()]bool
}

func (c *connected) OnReady(f func()) (stop func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.listeners[&f] = true
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.listeners, &f)
	}
}

func (c *connected) disconnect() {
	c.Respond(func(driver.Message) error { return failure(driver.Unavailable) })
}

func (c *connected) reconnect() {
	c.Respond(nil)
	c.mu.Lock()
	defer c.mu.Unlock()
	for f := range c.listeners {
		(*f)()
	}
}

func (c *connected) listening() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.listeners)
}

// reconnecting gives the bench's relay a publisher that reports its reconnects, and pauses that are longer than any
// test.
func (b *bench) reconnecting(source driver.Source) *connected {
	b.Helper()
	c := &connected{Publisher: b.publisher, listeners: map[*func()]bool{}}
	b.between(source, c, outbox.RelayConfig{Transports: map[string]driver.Publisher{"other": outboxtest.NewPublisher()}})
	b.relay.SetPauses(24*time.Hour, 48*time.Hour)
	return c
}

func TestReconnectEndsThePause(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		c := b.reconnecting(b.store)
		stop := b.start()
		for n := range 3 {
			c.disconnect()
			b.write(message("k", n))
			time.Sleep(time.Minute)
			if b.relay.Ready(b.Context()) == nil {
				b.Error("Ready while the transport is paused")
			}
			begin := time.Now()
			c.reconnect()
			synctest.Wait()
			if got := len(b.publisher.Received()); got != n+1 || !time.Now().Equal(begin) {
				b.Errorf("%d of %d arrived after %v", got, n+1, time.Since(begin))
			}
			if err := b.relay.Ready(b.Context()); err != nil {
				b.Errorf("Ready: %v", err)
			}
		}
		stop()
		if n := c.listening(); n > 0 {
			b.Errorf("%d listeners left", n)
		}
	})
}

// A publisher may reconnect before the relay has settled the batch that met the outage.
func TestReconnectBeforeThePause(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		slow := &slowToSettle{Source: b.store}
		c := b.reconnecting(slow)
		c.disconnect()
		b.write(message("k", 1))
		defer b.start()()
		time.Sleep(time.Second)
		c.reconnect()
		time.Sleep(time.Minute)
		b.wantReceived("1")
	})
}

// slowToSettle is a Source whose Settle takes two seconds.
type slowToSettle struct{ driver.Source }

func (s *slowToSettle) Settle(ctx context.Context, b driver.Batch, o []driver.Settlement) (driver.Settled, error) {
	time.Sleep(2 * time.Second)
	return s.Source.Settle(ctx, b, o)
}

// A reconnect does not excuse later failures: they pause the transport again.
func TestPauseAfterAReconnect(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		c := b.reconnecting(b.store)
		tries := 0
		b.publisher.Respond(func(driver.Message) error { tries++; return failure(driver.Unavailable) })
		b.write(message("k", 1))
		defer b.start()()
		for n := range 3 {
			time.Sleep(time.Minute)
			synctest.Wait()
			if tries != n+1 {
				b.Fatalf("%d tries, %d reconnects", tries, n)
			}
			c.mu.Lock()
			for f := range c.listeners {
				(*f)()
			}
			c.mu.Unlock()
		}
	})
}

// Drain waits for transports to reconnect within its time limit, and then uses them.
func TestReconnectDuringDrain(t *testing.T) {
	inBubble(t, outbox.RelayConfig{}, func(b *bench) {
		c := b.reconnecting(b.store)
		c.disconnect()
		b.write(message("k", 1))
		time.AfterFunc(20*time.Second, c.reconnect)
		if report, err := b.relay.Drain(b.Context(), outbox.Bounds{TimeLimit: time.Minute}); err != nil || report.Published != 1 {
			b.Errorf("report %+v, %v", report, err)
		}
		if n := c.listening(); n > 0 {
			b.Errorf("%d listeners left", n)
		}
	})
}
