package browser_test

import (
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

func TestHoldThenConfirm(t *testing.T) { onBoth(t, walkHoldThenConfirm) }

func walkHoldThenConfirm(v *visit) {
	v.hold("A1")
	v.await("the countdown", `/A1: held, 1[0-5]:[0-5][0-9] min left/.test(document.getElementById("mine").textContent)`)
	v.click(`button[aria-label="Confirm A1"]`)
	v.awaitSeat("A1", "sold, yours")
	v.awaitText("#stats", "0 held, 1 confirmed")
	v.hold("A2")
	v.click(`button[aria-label="Cancel A2"]`)
	v.awaitSeat("A2", "free")
	v.awaitText("#stats", "0 held, 1 confirmed, 1 cancelled")
	v.awaitCount("updated", 4)
	v.awaitText("#steps", "updated: cancelled")
	v.run("reload", chromedp.Reload())
	v.awaitSeat("A1", "sold, yours")
}

func TestKeyboardIsEnough(t *testing.T) { onBoth(t, walkKeyboardIsEnough) }

func walkKeyboardIsEnough(v *visit) {
	v.press(seat("B1", "free"), kb.Enter)
	v.awaitSeat("B1", "held, yours")
	v.await("the seat keeps the focus", `document.activeElement.textContent === "B1"`)
	v.press(`button[aria-label="Confirm B1"]`, " ")
	v.awaitSeat("B1", "sold, yours")
}

func TestHoldExpires(t *testing.T) { onBoth(t, walkHoldExpires, "-hold=2s") }

func walkHoldExpires(v *visit) {
	v.click(seat("A1", "free"))
	v.awaitText("#mine", "A1: expired")
	v.awaitSeat("A1", "free")
	v.awaitText("#stats", "0 held, 0 confirmed, 0 cancelled, 1 expired")
}

// TestSameKeyTwice has a limit of two, of which a busy machine gains none while the request is sent again.
func TestSameKeyTwice(t *testing.T) { onBoth(t, walkSameKeyTwice, "-user-limit=2") }

func walkSameKeyTwice(v *visit) {
	v.hold("A1")
	v.awaitText("#limits", "1 of 2")
	v.click("#again")
	v.awaitText("#status", "The same answer, and nothing was done twice.")
	v.awaitText("#last", "Idempotency-Replayed: true")
	v.awaitCount("request", 3)
	v.await("a replay costs nothing", `/[12] of 2/.test(document.getElementById("limits").textContent)`)
	v.awaitCount("transaction", 2)
}

// TestLimitIsReached has a limit of one, since a busy machine may take long enough to gain a unit of a larger one.
func TestLimitIsReached(t *testing.T) { onBoth(t, walkLimitIsReached, "-user-limit=1") }

func walkLimitIsReached(v *visit) {
	v.hold("A1")
	v.click(seat("A2", "free"))
	v.awaitText("#status", "429 RATE_LIMITED: try again in")
	v.awaitText("#last", "Retry-After: ")
	v.awaitText("#limits", "0 of 1,")
	v.awaitSeat("A2", "free")
	v.run("become another", chromedp.Clear(chromedp.CSS("#user")), chromedp.SendKeys(chromedp.CSS("#user"), "bob"+kb.Enter))
	v.awaitText("#limits", "1 of 1")
	v.hold("A2")
}
