package browser_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// password opens the operator's page on real servers.
const password = "open sesame"

// visit is the page of a shop.
type visit struct {
	*tab
	url     string
	servers *shop.Servers // nil: the shop is in memory, and its page has buttons that switch servers off
}

// onBoth has a shop in memory walked, and one on real servers.
func onBoth(t *testing.T, walk func(*visit), flags ...string) {
	t.Helper()
	t.Parallel()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		walk(openShop(t, flags...))
	})
	t.Run("servers", func(t *testing.T) {
		t.Parallel()
		walk(openShopOn(t, shop.Shared(t), flags...))
	})
}

// openShop shows the page of a shop in memory, and waits for its seats.
func openShop(t testing.TB, flags ...string) *visit {
	t.Helper()
	_ = testenv.Chromium(t) // for the skip, before anything is built
	v := &visit{url: shop.Start(t, nil, flags...).URL(), tab: newTab(t)}
	v.enter()
	return v
}

// openShopOn shows the page of a shop on real servers, and has it open an event.
func openShopOn(t testing.TB, servers shop.Servers, flags ...string) *visit {
	t.Helper()
	_ = testenv.Chromium(t)
	env := append(servers.Env(), "OPERATOR_PASSWORD="+password)
	process := shop.Start(t, env, append([]string{"-backend=services", "-trials"}, flags...)...)
	v := &visit{url: process.URL(), tab: newTab(t), servers: &servers}
	v.enter()
	return v
}

// enter opens the shop's page.
func (v *visit) enter() {
	v.t.Helper()
	v.open(v.url + "/")
	v.awaitText("#connection", "Live.")
	if v.servers != nil {
		v.click("#new-event")
	}
	v.await("seats", `document.querySelectorAll("#map button").length === 50`)
}

// operate opens the operator's page. The browser remembers what a visitor types there.
func (v *visit) operate() {
	v.t.Helper()
	address := v.url + "/operator/"
	if v.servers != nil {
		address = strings.Replace(address, "://", "://ada:"+strings.ReplaceAll(password, " ", "%20")+"@", 1)
	}
	v.open(address)
	v.awaitText("h1", "Status")
}

// seat selects the button of a seat.
func seat(name, state string) string {
	return fmt.Sprintf(`#map button[aria-label^="Seat %s, %s"]`, name, state)
}

// awaitSeat waits until a seat is in a state.
func (v *visit) awaitSeat(name, state string) {
	v.t.Helper()
	v.await(fmt.Sprintf("%s is %s", name, state), fmt.Sprintf("document.querySelector(%q)", seat(name, state)))
}

// awaitHeld waits until so many seats are held.
func (v *visit) awaitHeld(count int) {
	v.t.Helper()
	v.await(fmt.Sprintf("%d seats are held", count), fmt.Sprintf(`document.querySelectorAll("#map button.held").length === %d`, count))
}

// awaitCount waits until so many have come to a stage. On real servers the flow may count twice, and a message that comes
// again is counted again.
func (v *visit) awaitCount(stage string, count int) {
	v.t.Helper()
	is := "==="
	if v.servers != nil {
		is = ">="
	}
	v.await(fmt.Sprintf("%d have come to %s", count, stage), fmt.Sprintf(`Number(document.getElementById("count-%s").textContent) %s %d`, stage, is, count))
}

// hold holds a free seat and waits for the answer.
func (v *visit) hold(name string) {
	v.t.Helper()
	v.click(seat(name, "free"))
	v.awaitSeat(name, "held, yours")
}
