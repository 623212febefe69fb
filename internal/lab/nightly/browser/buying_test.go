package browser_test

import (
	"fmt"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
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

// TestSameKeyTwice has a limit of two. A busy machine gains no unit back while the request is repeated.
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

// TestLimitIsReached has a limit of one, because a slow machine may gain back a unit of a larger limit.
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

// Reservations in the fixed messages.
const (
	oneID = "01a20bc7-773e-70e0-8840-f22071b9cf15"
	allID = "01a20bc7-773e-70e0-8840-f22071b9cf16"
)

// TestDeadLettersAreMended makes messages with a wrong id fail. It goes by keyboard from the status to the body of one,
// and back to a status without dead letters. Then the shop's counts include the fixed messages.
func TestDeadLettersAreMended(t *testing.T) { onBoth(t, walkDeadLetters) }

func walkDeadLetters(v *visit) {
	event := ask(v.tab, "event", chromedp.Evaluate[string](`document.getElementById("event").value`))
	const letters = 3
	v.poison(letters)
	v.operate()
	v.awaitText("#live", fmt.Sprint(v.failed("validation"), " ", letters))
	v.follow(`#live .figures a[href*="groups?from=reservation.stats"]`, "Dead letters by kind")
	v.awaitText(".cards .count", fmt.Sprint(letters))
	v.awaitText(".cards .error", "invalid UUID")
	v.follow(`.cards a[href^="dead-letters?"]`, "Dead letters")
	v.awaitRows(letters)
	v.follow("tbody a", "Dead letter")
	v.fixOne(fmt.Sprintf(`{"reservation_id":%q,"event_id":%q}`, oneID, event))

	v.follow(`a[href="groups"]`, "Dead letters by kind")
	v.awaitText(".cards .count", fmt.Sprint(letters-1))
	v.follow(`.cards a[href*="what=retry"]`, "Preview")
	v.fixAll(fmt.Sprintf(`{"reservation_id":%q,"event_id":%q}`, allID, event), letters-1)

	v.follow(`a[href="groups"]`, "Dead letters by kind")
	v.awaitText("main", "No dead letters")
	v.follow(`nav a[href="log"]`, "Log")
	for _, reason := range []string{"one by hand", "the others by a patch"} {
		v.awaitText("tbody", reason)
	}
	v.awaitText("tbody", "edit and retry")
	v.awaitText("tbody", v.operator())
	v.open(v.url + "/")
	v.awaitText("#stats", "2 held")
	v.awaitText("#count-dead", "0")
}

// fixOne opens the body of the current letter, writes another body, and retries the letter.
func (v *visit) fixOne(body string) {
	v.t.Helper()
	v.awaitText("dl", "reservation.held")
	v.awaitText("dl .error", "invalid UUID")
	v.await("the body is not shown", `!document.querySelector("pre")`)
	v.follow(`a[href*="body=1"]`, "Dead letter")
	v.awaitText("pre", `"reservation_id": "poison"`)
	v.await("headers", `[...document.querySelectorAll("h2")].some((h) => h.textContent === "Headers")`)

	v.press("summary", kb.Enter)
	v.wantAccessible("a letter with its body")
	v.fill(`textarea[name="edited"]`, body)
	v.follow("details button", "Preview")
	v.awaitText(".headline", "1 would be sent again")
	v.awaitText("pre", oneID)
	v.fill(`input[name="reason"]`, "one by hand")
	v.follow(".actions button", "Change")
	v.awaitText("#live", "1 retried")
	v.wantAccessible("a change that has ended")
}

// fixAll applies a patch to the letters of the current preview, and retries them.
func (v *visit) fixAll(patch string, count int) {
	v.t.Helper()
	v.awaitText(".headline", fmt.Sprintf("%d would be sent again", count))
	v.press("summary", kb.Enter)
	v.fill(`textarea[name="patch"]`, patch)
	v.follow(`button[formaction="preview"]`, "Preview")
	v.awaitText("pre", allID)
	v.wantAccessible("a preview with a patch")
	v.fill(`input[name="reason"]`, "the others by a patch")
	v.follow(".actions button", "Change")
	v.awaitText("#live", fmt.Sprintf("%d retried", count))
}

// poison sends the consumer messages that no attempt can process.
func (v *visit) poison(count int) {
	v.t.Helper()
	for n := range count {
		v.click("#poison")
		v.awaitText("#count-dead", fmt.Sprint(n+1))
	}
}

// operator returns the name that the operator's page has for its visitor.
func (v *visit) operator() string {
	if v.servers == nil {
		return "visitor"
	}
	return "ada"
}

func TestCrowdIsSoldEverySeatOnce(t *testing.T) { onBoth(t, walkCrowd) }

func walkCrowd(v *visit) {
	v.click("#burst")
	v.awaitText("#oversold", "oversold: 0")
	v.awaitText("#result", "50 seats sold, 50 reservations in the read model.")
	v.awaitText("#result", "409 SEATS_UNAVAILABLE150")
	v.awaitText("#result", "20150")
	v.awaitHeld(50)
	v.awaitCount("updated", 50)
	v.awaitText("#count-outbox", "0")
	v.awaitText("#count-queue", "0")
}

// TestDuplicatesTakeEffectOnce has a limit that no crowd uses up, because each duplicate takes a unit until it is
// answered.
func TestDuplicatesTakeEffectOnce(t *testing.T) { onBoth(t, walkDuplicates, "-user-limit=100000") }

func walkDuplicates(v *visit) {
	v.click("#duplicates")
	v.awaitText("#effects", "reservations made: 1")
	v.awaitText("#result", "All got the same answer.")
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

// turn clicks a button that injects a fault, and waits until the fault is there.
func (v *visit) turn(selector string) {
	v.t.Helper()
	v.click(selector)
	v.await(selector+" is on", fmt.Sprintf(`document.querySelector(%q).getAttribute("aria-pressed") === "true"`, selector))
}

// TestServersKilled kills and restarts Postgres and Redis, and cuts the network to RabbitMQ.
func TestServersKilled(t *testing.T) {
	t.Parallel()
	database, redis := testenv.Private(t, testenv.Postgres), testenv.Private(t, testenv.Redis, "--appendonly", "yes")
	broker := testenv.NewProxy(t, amqptest.New(t).URL)
	v := openShopOn(t, shop.Servers{Database: database.URL(), Redis: redis.URL(), Broker: broker.URL()})
	v.hold("A1")
	v.awaitText("#stats", "1 held")

	check(t, database.Kill())
	v.awaitText("#stats", "Shop unavailable (503")
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

	// The shop sells without the broker, and its messages wait.
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

// TestPictures takes the picture in the shop's README. RECORD=1 replaces it.
func TestPictures(t *testing.T) {
	t.Parallel()
	v := openShop(t)
	v.run("size", chromedp.EmulateViewport(960, 980))
	v.hold("B3")
	v.click(`button[aria-label="Confirm B3"]`)
	v.awaitSeat("B3", "sold, yours")
	v.hold("B4")
	v.click("#duplicates")
	v.awaitText("#effects", "reservations made: 1")
	v.awaitText("#stats", "2 held, 1 confirmed")
	v.turn(`[data-server="rabbitmq"]`)
	v.hold("C5")
	v.awaitText("#count-outbox", "1")
	v.both("examples/reservation", "page")
}
