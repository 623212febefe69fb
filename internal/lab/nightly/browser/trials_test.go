package browser_test

import (
	"fmt"
	"testing"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
)

func TestCrowdIsSoldEverySeatOnce(t *testing.T) { onBoth(t, walkCrowd) }

func walkCrowd(v *visit) {
	v.click("#burst")
	v.awaitText("#oversold", "oversold: 0")
	v.awaitText("#result", "50 seats were given away, and the messages tell of 50 reservations.")
	v.awaitText("#result", "409 SEATS_UNAVAILABLE150")
	v.awaitText("#result", "20150")
	v.awaitHeld(50)
	v.awaitCount("updated", 50)
	v.awaitText("#count-outbox", "0")
	v.awaitText("#count-queue", "0")
}

// TestDuplicatesTakeEffectOnce has a limit that no crowd uses up, since each duplicate takes a unit until it is answered.
func TestDuplicatesTakeEffectOnce(t *testing.T) { onBoth(t, walkDuplicates, "-user-limit=100000") }

func walkDuplicates(v *visit) {
	v.click("#duplicates")
	v.awaitText("#effects", "reservations made: 1")
	v.awaitText("#result", "All were given the same answer.")
	v.awaitText("#result", "201, replayed49")
	v.awaitHeld(1)
	v.awaitCount("transaction", 2)
}

func TestPoisonMessage(t *testing.T) { onBoth(t, walkPoison) }

func walkPoison(v *visit) {
	v.click("#poison")
	v.awaitText("#count-dead", "1")
	v.hold("A1")
	v.awaitText("#stats", "1 held")
	v.awaitText("#steps", "failed: reservation.held, attempt 1")
}

// turn clicks a button that breaks something, and waits until it is broken.
func (v *visit) turn(selector string) {
	v.t.Helper()
	v.click(selector)
	v.await(selector+" is on", fmt.Sprintf(`document.querySelector(%q).getAttribute("aria-pressed") === "true"`, selector))
}

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
