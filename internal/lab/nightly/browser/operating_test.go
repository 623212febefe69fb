package browser_test

import (
	"fmt"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// Reservations of which messages tell after they were mended.
const (
	oneID = "01a20bc7-773e-70e0-8840-f22071b9cf15"
	allID = "01a20bc7-773e-70e0-8840-f22071b9cf16"
)

// TestDeadLettersAreMended has messages with a wrong id die, and walks by keyboard from the status to the body of one,
// and back to a status without dead letters. What the mended messages tell is in the shop's counts then.
func TestDeadLettersAreMended(t *testing.T) { onBoth(t, walkDeadLetters) }

func walkDeadLetters(v *visit) {
	event := ask(v.tab, "event", chromedp.Evaluate[string](`document.getElementById("event").value`))
	const letters = 3
	v.poison(letters)
	v.operate()
	v.awaitText("#live", fmt.Sprint("validation ", letters))
	v.follow(`#live a[href*="class=validation"]`, "Dead letters by kind")
	v.awaitText(".cards .count", fmt.Sprint(letters))
	v.awaitText(".cards .error", "invalid UUID")
	v.follow(`.cards a[href^="letters?"]`, "Dead letters")
	v.awaitRows(letters)
	v.follow("tbody a", "One dead letter")
	v.mendOne(fmt.Sprintf(`{"reservation_id":%q,"event_id":%q}`, oneID, event))

	v.follow(`a[href="groups"]`, "Dead letters by kind")
	v.awaitText(".cards .count", fmt.Sprint(letters-1))
	v.follow(`.cards a[href*="what=retry"]`, "Before it begins")
	v.mendAll(fmt.Sprintf(`{"reservation_id":%q,"event_id":%q}`, allID, event), letters-1)

	v.follow(`a[href="groups"]`, "Dead letters by kind")
	v.awaitText("main", "There is none.")
	v.follow(`nav a[href="log"]`, "What operators did")
	for _, reason := range []string{"one by hand", "the others by a patch"} {
		v.awaitText("tbody", reason)
	}
	v.awaitText("tbody", "edit and retry")
	v.awaitText("tbody", v.operator())
	v.open(v.url + "/")
	v.awaitText("#stats", "2 held")
	v.awaitText("#count-dead", "0")
}

// mendOne looks at the body of the letter that is shown, writes another one, and retries it.
func (v *visit) mendOne(body string) {
	v.t.Helper()
	v.awaitText("dl", "reservation.held")
	v.awaitText("dl .error", "invalid UUID")
	v.await("the body is not shown", `!document.querySelector("pre")`)
	v.follow(`a[href*="body=1"]`, "One dead letter")
	v.awaitText("pre", `"reservation_id": "poison"`)
	v.await("headers", `[...document.querySelectorAll("h2")].some((h) => h.textContent === "Headers")`)

	v.press("summary", kb.Enter)
	v.wantAccessible("a letter with its body")
	v.fill(`textarea[name="edited"]`, body)
	v.follow("details button", "Before it begins")
	v.awaitText(".headline", "1 would be sent again")
	v.awaitText("pre", oneID)
	v.fill(`input[name="reason"]`, "one by hand")
	v.follow(".actions button", "A change")
	v.awaitText("#live", "1 retried")
	v.wantAccessible("a change that has ended")
}

// mendAll gives the letters of the preview that is shown a patch, and retries them.
func (v *visit) mendAll(patch string, count int) {
	v.t.Helper()
	v.awaitText(".headline", fmt.Sprintf("%d would be sent again", count))
	v.press("summary", kb.Enter)
	v.fill(`textarea[name="patch"]`, patch)
	v.follow(`button[formaction="preview"]`, "Before it begins")
	v.awaitText("pre", allID)
	v.wantAccessible("a preview with a patch")
	v.fill(`input[name="reason"]`, "the others by a patch")
	v.follow(".actions button", "A change")
	v.awaitText("#live", fmt.Sprintf("%d retried", count))
}

// poison has the consumer given messages that no attempt can process.
func (v *visit) poison(count int) {
	v.t.Helper()
	for n := range count {
		v.click("#poison")
		v.awaitText("#count-dead", fmt.Sprint(n+1))
	}
}

// operator is who the operator's page says that its visitor is.
func (v *visit) operator() string {
	if v.servers == nil {
		return "visitor"
	}
	return "ada"
}
