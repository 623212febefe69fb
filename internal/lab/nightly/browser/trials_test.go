package browser_test

import (
	"fmt"
	"testing"
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

func TestOutageOfEachServer(t *testing.T) {
	t.Parallel()
	v := openShop(t)

	v.click(`[data-server="postgres"]`)
	v.awaitText("#stats", "The shop cannot be read now (503 DATABASE_UNAVAILABLE)")
	v.click(seat("A1", "free"))
	v.awaitText("#status", "503 IDEMPOTENCY_STORE_UNAVAILABLE: try again in")
	v.click(`[data-server="postgres"]`)
	v.awaitText("#stats", "0 held")
	v.hold("A1")
	v.awaitText("#stats", "1 held")

	v.click(`[data-server="redis"]`)
	v.awaitText("#limits", "Unknown")
	v.click(seat("A2", "free"))
	v.awaitText("#status", "503 RATE_LIMIT_UNAVAILABLE")
	v.click(`[data-server="redis"]`)
	v.awaitText("#limits", "of 10")
	v.hold("A2")
	v.awaitText("#stats", "2 held")

	// The shop sells without the broker, and what it has to tell waits.
	v.turn(`[data-server="rabbitmq"]`)
	v.hold("A3")
	v.awaitText("#count-outbox", "1")
	v.awaitText("#stats", "2 held")
	v.click(`[data-server="rabbitmq"]`)
	v.awaitText("#stats", "3 held")
	v.awaitText("#count-outbox", "0")
}

func TestPoisonMessage(t *testing.T) { onBoth(t, walkPoison) }

func walkPoison(v *visit) {
	v.click("#poison")
	v.awaitText("#count-dead", "1")
	v.hold("A1")
	v.awaitText("#stats", "1 held")
	v.awaitText("#steps", "failed: reservation.held, attempt 1")
}

func TestSlowConsumer(t *testing.T) { onBoth(t, walkSlowConsumer) }

func walkSlowConsumer(v *visit) {
	v.turn("#slow")
	v.click("#burst")
	v.await("messages wait", `Number(document.getElementById("count-queue").textContent) > 0`)
	v.click("#slow")
	v.awaitText("#oversold", "oversold: 0")
	v.awaitCount("updated", 50)
	v.awaitText("#count-queue", "0")
	v.awaitText("#stats", "50 held")
}

// turn clicks a button that breaks something, and waits until it is broken.
func (v *visit) turn(selector string) {
	v.t.Helper()
	v.click(selector)
	v.await(selector+" is on", fmt.Sprintf(`document.querySelector(%q).getAttribute("aria-pressed") === "true"`, selector))
}
