package browser_test

import (
	"testing"

	"github.com/chromedp/chromedp"
)

var schemes = []string{"light", "dark"}

// TestShopIsAccessible looks at the page with everything on it, as wide as a desk and as narrow as a phone.
func TestShopIsAccessible(t *testing.T) {
	t.Parallel()
	p, _ := openShop(t)
	p.hold("A1")
	p.hold("A2")
	p.click(`button[aria-label="Confirm A2"]`)
	p.awaitSeat("A2", "sold, yours")
	p.click("#duplicates")
	p.awaitText("#effects", "reservations made: 1")
	p.click("#slow")
	p.click(`[data-server="redis"]`)
	p.awaitText("#limits", "Unknown")
	p.click(seat("A4", "free"))
	p.awaitText("#status", "503")
	for _, scheme := range schemes {
		p.scheme(scheme)
		p.run("a desk", chromedp.EmulateViewport(1280, 1400))
		p.wantAccessible(scheme + ", wide")
		p.run("a phone", chromedp.EmulateViewport(360, 800))
		p.await("nothing is cut off", "document.documentElement.scrollWidth <= 360")
		p.wantAccessible(scheme + ", narrow")
	}
	p.click(`[data-server="redis"]`)
	p.awaitText("#limits", "of 10")
	p.wantAccessible("limits")
}

func TestOperatorIsAccessible(t *testing.T) {
	t.Parallel()
	p, url := openShop(t)
	p.click("#poison")
	p.awaitText("#count-dead", "1")
	p.click(`nav a[href="/operator/"]`)
	p.awaitText("h1", "Status")
	for _, view := range []string{"", "groups", "letters", "waiting", "limits?key=ada", "log"} {
		p.open(url + "/operator/" + view)
		for _, scheme := range schemes {
			p.scheme(scheme)
			p.wantAccessible(view + ", " + scheme)
		}
	}
}
