package browser_test

import (
	"testing"

	"github.com/chromedp/chromedp"
)

var schemes = []string{"light", "dark"}

// TestShopIsAccessible looks at the page with everything on it, as wide as a desk and as narrow as a phone.
func TestShopIsAccessible(t *testing.T) {
	t.Parallel()
	v := openShop(t)
	v.hold("A1")
	v.hold("A2")
	v.click(`button[aria-label="Confirm A2"]`)
	v.awaitSeat("A2", "sold, yours")
	v.click("#duplicates")
	v.awaitText("#effects", "reservations made: 1")
	v.click("#slow")
	v.click(`[data-server="redis"]`)
	v.awaitText("#limits", "Unknown")
	v.click(seat("A4", "free"))
	v.awaitText("#status", "503")
	for _, scheme := range schemes {
		v.scheme(scheme)
		v.run("a desk", chromedp.EmulateViewport(1280, 1400))
		v.wantAccessible(scheme + ", wide")
		v.run("a phone", chromedp.EmulateViewport(360, 800))
		v.await("nothing is cut off", "document.documentElement.scrollWidth <= 360")
		v.wantAccessible(scheme + ", narrow")
	}
	v.click(`[data-server="redis"]`)
	v.awaitText("#limits", "of 10")
	v.wantAccessible("limits")
}

func TestOperatorIsAccessible(t *testing.T) {
	t.Parallel()
	v := openShop(t)
	v.click("#poison")
	v.awaitText("#count-dead", "1")
	v.click(`nav a[href="/operator/"]`)
	v.awaitText("h1", "Status")
	for _, view := range []string{"", "groups", "letters", "waiting", "limits?key=ada", "log"} {
		v.open(v.url + "/operator/" + view)
		for _, scheme := range schemes {
			v.scheme(scheme)
			v.wantAccessible(view + ", " + scheme)
		}
	}
}
