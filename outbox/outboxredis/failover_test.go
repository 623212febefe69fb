package outboxredis_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/internal/redistest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxredis"
)

// A replica that has taken over takes messages, though nobody refers the client to it.
func TestClusterFailover(t *testing.T) {
	t.Parallel()
	client, failOver := redistest.Failover(t)
	p := newPublisher(t, client, outboxredis.Config{})
	send := func() error { return publish(t, p, driver.Message{Name: "a"}) }
	if err := send(); err != nil {
		t.Fatal(err)
	}
	failOver()
	testenv.Eventually(t, send)
}
