package browser_test

import "testing"

func TestCrowdIsSoldEverySeatOnce(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t)
	p.click("#burst")
	p.awaitText("#oversold", "oversold: 0")
	p.awaitText("#result", "50 seats were given away, and the messages tell of 50 reservations.")
	p.awaitText("#result", "409 SEATS_UNAVAILABLE150")
	p.awaitText("#result", "20150")
	p.await("all seats are held", `document.querySelectorAll("#map button.held").length === 50`)
}

func TestDuplicatesTakeEffectOnce(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t)
	p.click("#duplicates")
	p.awaitText("#effects", "reservations made: 1")
	p.awaitText("#result", "All were given the same answer.")
	p.await("one seat is held", `document.querySelectorAll("#map button.held").length === 1`)
	p.awaitText("#count-transaction", "2")
}

func TestOutageOfEachServer(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t)

	p.click(`[data-server="postgres"]`)
	p.awaitText("#stats", "The shop cannot be read now (503 DATABASE_UNAVAILABLE)")
	p.click(seat("A1", "free"))
	p.awaitText("#status", "503 DATABASE_UNAVAILABLE: try again in")
	p.click(`[data-server="postgres"]`)
	p.awaitText("#stats", "0 held")
	p.hold("A1")
	p.awaitText("#stats", "1 held")

	p.click(`[data-server="redis"]`)
	p.awaitText("#limits", "Unknown")
	p.click(seat("A2", "free"))
	p.awaitText("#status", "503 RATE_LIMIT_UNAVAILABLE")
	p.click(`[data-server="redis"]`)
	p.awaitText("#limits", "of 10")
	p.hold("A2")
	p.awaitText("#stats", "2 held")

	// The shop sells without the broker, and what it has to tell waits.
	p.click(`[data-server="rabbitmq"]`)
	p.hold("A3")
	p.awaitText("#count-outbox", "1")
	p.awaitText("#stats", "2 held")
	p.click(`[data-server="rabbitmq"]`)
	p.awaitText("#stats", "3 held")
	p.awaitText("#count-outbox", "0")
}

func TestPoisonMessage(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t)
	p.click("#poison")
	p.awaitText("#count-dead", "1")
	p.hold("A1")
	p.awaitText("#stats", "1 held")
	p.awaitText("#steps", "failed: reservation.held, attempt 1")
}

func TestSlowConsumer(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t)
	p.click("#slow")
	p.await("it is slow", `document.getElementById("slow").getAttribute("aria-pressed") === "true"`)
	p.click("#burst")
	p.await("messages wait", `Number(document.getElementById("count-queue").textContent) > 0`)
	p.click("#slow")
	p.awaitText("#oversold", "oversold: 0")
	p.awaitText("#count-updated", "50")
	p.awaitText("#count-queue", "0")
	p.awaitText("#stats", "50 held")
}
