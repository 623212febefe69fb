package browser_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/internal/amqptest"
	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// TestServersKilled has Postgres and Redis killed and started again, and the network to RabbitMQ cut.
func TestServersKilled(t *testing.T) {
	t.Parallel()
	database, redis := testenv.Private(t, testenv.Postgres), testenv.Private(t, testenv.Redis, "--appendonly", "yes")
	broker := testenv.NewProxy(t, amqptest.New(t).URL)
	v := openShopOn(t, shop.Servers{Database: database.URL(), Redis: redis.URL(), Broker: broker.URL()})
	v.hold("A1")
	v.awaitText("#stats", "1 held")

	check(t, database.Kill())
	v.awaitText("#stats", "The shop cannot be read now (503")
	v.click(seat("A2", "free"))
	v.awaitText("#status", "503 ")
	v.awaitText("#count-outbox", "?")
	check(t, database.Start(t.Context()))
	v.awaitText("#stats", "1 held")
	v.hold("A2")
	v.awaitText("#stats", "2 held")

	check(t, redis.Kill())
	v.awaitText("#limits", "Unknown")
	v.awaitText("#count-updated", "?")
	v.click(seat("A3", "free"))
	v.awaitText("#status", "503 ")
	check(t, redis.Start(t.Context()))
	v.awaitText("#limits", "of 10")
	v.hold("A3")
	v.awaitText("#stats", "3 held")

	// The shop sells without the broker, and what it has to tell waits.
	broker.Cut()
	v.hold("A4")
	v.awaitText("#count-queue", "?")
	v.awaitText("#count-outbox", "1")
	v.awaitText("#stats", "3 held")
	broker.Heal()
	v.awaitText("#stats", "4 held")
	v.awaitText("#count-outbox", "0")
	v.awaitCount("updated", 4)
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
