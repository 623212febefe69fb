package browser_test

import (
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

func TestHoldThenConfirm(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t)
	p.hold("A1")
	p.await("the countdown", `/A1: held, 1[0-5]:[0-5][0-9] min left/.test(document.getElementById("mine").textContent)`)
	p.click(`button[aria-label="Confirm A1"]`)
	p.awaitSeat("A1", "sold, yours")
	p.awaitText("#stats", "0 held, 1 confirmed")
	p.hold("A2")
	p.click(`button[aria-label="Cancel A2"]`)
	p.awaitSeat("A2", "free")
	p.awaitText("#stats", "0 held, 1 confirmed, 1 cancelled")
	p.awaitText("#count-updated", "4")
	p.awaitText("#steps", "updated: cancelled")

	p.run("reload", chromedp.Reload())
	p.awaitSeat("A1", "sold, yours")
}

func TestKeyboardIsEnough(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t)
	p.run("hold", chromedp.Focus(chromedp.CSS(seat("B1", "free"))), chromedp.KeyEvent(kb.Enter))
	p.awaitSeat("B1", "held, yours")
	p.await("the seat keeps the focus", `document.activeElement.textContent === "B1"`)
	p.run("confirm", chromedp.Focus(chromedp.CSS(`button[aria-label="Confirm B1"]`)), chromedp.KeyEvent(" "))
	p.awaitSeat("B1", "sold, yours")
}

func TestHoldExpires(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t, "-hold=2s")
	p.click(seat("A1", "free"))
	p.awaitText("#mine", "A1: expired")
	p.awaitSeat("A1", "free")
	p.awaitText("#stats", "0 held, 0 confirmed, 0 cancelled, 1 expired")
}

func TestSameKeyTwice(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t)
	p.hold("A1")
	p.awaitText("#limits", "9 of 10")
	p.click("#again")
	p.awaitText("#status", "The same answer, and nothing was done twice.")
	p.awaitText("#last", "Idempotency-Replayed: true")
	p.awaitText("#count-request", "3")
	p.awaitText("#count-transaction", "2")
	p.awaitText("#limits", "9 of 10") // a replay costs nothing
}

// TestLimitIsReached has a limit of one, since a busy machine may take long enough to gain a unit of a larger one.
func TestLimitIsReached(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t, "-user-limit=1")
	p.hold("A1")
	p.click(seat("A2", "free"))
	p.awaitText("#status", "429 RATE_LIMITED: try again in")
	p.awaitText("#last", "Retry-After: ")
	p.awaitText("#limits", "0 of 1,")
	p.awaitSeat("A2", "free")
	p.run("become another", chromedp.Clear(chromedp.CSS("#user")), chromedp.SendKeys(chromedp.CSS("#user"), "bob"+kb.Enter))
	p.awaitText("#limits", "1 of 1")
	p.hold("A2")
}
