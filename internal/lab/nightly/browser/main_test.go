// Package browser tests the pages of the reservation example in a real Chromium. A shop runs as a process, in memory and
// on real servers, and the tests click and type like a visitor. They also open the operator's page with very many dead
// letters.
//
// `make browser` runs them at night: the module is not in go.work, so that other builds do not compile its tools. The
// command finds the browser or installs it. With -artifacts it keeps the page of a failed test.
package browser_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/holdfast-go/holdfast/internal/lab/shop"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) {
	code := testenv.Run(m)
	shop.Remove()
	os.Exit(code)
}

// password opens the operator's page on real servers.
const password = "open sesame"

// visit is a visit to the page of a shop.
type visit struct {
	*tab
	url     string
	servers *shop.Servers // nil: the shop is in memory, and its page has buttons that switch servers off
}

// failed returns the class under which the status counts dead letters. RabbitMQ has one queue for all classes.
func (v *visit) failed(class string) string {
	if v.servers == nil {
		return class
	}
	return "default"
}

// onBoth walks through a shop in memory, and through one on real servers.
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

// openShop opens the page of a shop in memory, and waits for its seats.
func openShop(t testing.TB, flags ...string) *visit {
	t.Helper()
	_ = testenv.Chromium(t) // skips before anything is built
	v := &visit{url: shop.Start(t, nil, flags...).URL(), tab: newTab(t)}
	v.enter()
	return v
}

// openShopOn opens the page of a shop on real servers, and creates an event.
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

// operate opens the operator's page. The browser remembers the visitor's input there.
func (v *visit) operate() {
	v.t.Helper()
	address := v.url + "/operator/"
	if v.servers != nil {
		address = strings.Replace(address, "://", "://ada:"+strings.ReplaceAll(password, " ", "%20")+"@", 1)
	}
	v.open(address)
	v.awaitText("h1", "Status")
}

// seat returns the selector of a seat's button.
func seat(name, state string) string {
	return fmt.Sprintf(`#map button[aria-label^="Seat %s, %s"]`, name, state)
}

// awaitSeat waits until a seat is in a state.
func (v *visit) awaitSeat(name, state string) {
	v.t.Helper()
	v.await(fmt.Sprintf("%s is %s", name, state), fmt.Sprintf("document.querySelector(%q)", seat(name, state)))
}

// awaitHeld waits until the given number of seats is held.
func (v *visit) awaitHeld(count int) {
	v.t.Helper()
	v.await(fmt.Sprintf("%d seats are held", count), fmt.Sprintf(`document.querySelectorAll("#map button.held").length === %d`, count))
}

// awaitCount waits until the given number has reached a stage. On real servers the flow may count twice, and a redelivered
// message counts again.
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

// tab is a page in its own browser.
type tab struct {
	t   testing.TB
	ctx context.Context

	mu       sync.Mutex
	problems []string // reported by the browser
}

// newTab starts a browser with an empty profile, until the test ends.
func newTab(t testing.TB) *tab {
	t.Helper()
	options := []chromedp.ExecAllocatorOption{
		chromedp.ExecPath(testenv.Chromium(t)), chromedp.Headless, chromedp.NoSandbox, chromedp.DisableGPU, chromedp.NoFirstRun,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true),
		chromedp.Flag("disable-dev-shm-usage", true), // /dev/shm is small in containers
		chromedp.WindowSize(1280, 1400),
	}
	allocator, stop := chromedp.NewExecAllocator(context.Background(), options...)
	p := &tab{t: t}
	ctx, closeTab := chromedp.NewContext(allocator)
	p.ctx = ctx
	t.Cleanup(func() {
		p.report()
		farewell, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if err := chromedp.Cancel(farewell); err != nil {
			t.Logf("the browser did not exit cleanly: %v", err)
		}
		closeTab()
		stop()
	})
	if err := chromedp.Listen(ctx, p.listen); err != nil {
		t.Fatal(err)
	}
	_, err1 := chromedp.Call(ctx, log.Enable, cdp.Empty{})
	_, err2 := chromedp.Call(ctx, runtime.Enable, cdp.Empty{})
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return p
}

// listen records failed scripts, and violations of the page's policy. A request that the shop rejects is not a problem.
func (p *tab) listen(event any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		p.problems = append(p.problems, e.ExceptionDetails.Text)
		if thrown := e.ExceptionDetails.Exception; thrown != nil {
			p.problems = append(p.problems, thrown.Description)
		}
	case *log.EventEntryAdded:
		if e.Entry.Level == log.EntryLevelError && e.Entry.Source != log.EntrySourceNetwork {
			p.problems = append(p.problems, e.Entry.Text)
		}
	}
}

// report fails the test for recorded problems, and keeps the page of a failed test.
func (p *tab) report() {
	p.mu.Lock()
	problems := p.problems
	p.mu.Unlock()
	for _, problem := range problems {
		p.t.Errorf("the browser reports: %s", problem)
	}
	if !p.t.Failed() {
		return
	}
	ctx, cancel := context.WithTimeout(p.ctx, 10*time.Second)
	defer cancel()
	text, err1 := chromedp.Run(ctx, chromedp.Evaluate[string]("document.body.innerText"))
	picture, err2 := chromedp.Run(ctx, chromedp.FullScreenshot(100))
	if err := errors.Join(err1, err2); err != nil {
		p.t.Logf("could not read the page: %v", err)
		return
	}
	p.t.Logf("text of the page:\n%s", text)
	path := filepath.Join(p.t.ArtifactDir(), "page.png")
	if err := os.WriteFile(path, picture, 0o644); err != nil {
		p.t.Log(err)
	}
}

func (p *tab) run(what string, actions ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	ask(p, what, chromedp.Steps(actions...))
}

// ask runs one action and returns its result.
func ask[T any](p *tab, what string, action chromedp.Action[T]) T {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, testenv.Patience)
	defer cancel()
	value, err := chromedp.Run(ctx, action)
	if err != nil {
		p.t.Fatalf("%s: %v", what, err)
	}
	return value
}

func (p *tab) open(url string) {
	p.t.Helper()
	p.run("open "+url, chromedp.Navigate(url))
}

// await waits until the expression is true.
func (p *tab) await(what, expression string) {
	p.t.Helper()
	testenv.Eventually(p.t, func() error {
		if !ask(p, what, chromedp.Evaluate[bool]("Boolean("+expression+")")) {
			return fmt.Errorf("%s: %s is not so", what, expression)
		}
		return nil
	})
}

// awaitText waits until an element shows a text.
func (p *tab) awaitText(selector, text string) {
	p.t.Helper()
	p.await(fmt.Sprintf("%s shows %q", selector, text), fmt.Sprintf("document.querySelector(%q)?.textContent.includes(%q)", selector, text))
}

// click clicks with the mouse.
func (p *tab) click(selector string) {
	p.t.Helper()
	p.run("click "+selector, chromedp.Click(chromedp.CSS(selector), chromedp.NodeVisible))
}

// scheme makes the visitor prefer light or dark pages.
func (p *tab) scheme(name string) {
	p.t.Helper()
	features := []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}
	if _, err := chromedp.Call(p.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features}); err != nil {
		p.t.Fatal(err)
	}
}

// press presses a key on the element of a selector.
func (p *tab) press(selector, key string) {
	p.t.Helper()
	p.focus(selector)
	p.run("press on "+selector, chromedp.KeyEvent(key))
}

// focus focuses an element in one step of the page, because live parts are replaced repeatedly and pass the focus on.
func (p *tab) focus(selector string) {
	p.t.Helper()
	p.await(selector+" has the focus", fmt.Sprintf(`((e) => e && (e.focus(), document.activeElement === e))(document.querySelector(%q))`, selector))
}

// follow follows a link or submits a form by keyboard, and waits for the next view.
func (p *tab) follow(selector, heading string) {
	p.t.Helper()
	p.run("mark the view", chromedp.Evaluate[chromedp.Void](`document.body.dataset.left = ""`))
	p.press(selector, kb.Enter)
	arrived := fmt.Sprintf(`document.readyState === "complete" && !("left" in document.body.dataset) && document.querySelector("h1").textContent === %q`, heading)
	testenv.Eventually(p.t, func() error {
		ctx, cancel := context.WithTimeout(p.ctx, testenv.Patience)
		defer cancel()
		there, err := chromedp.Run(ctx, chromedp.Evaluate[bool](arrived))
		if err == nil && !there {
			err = fmt.Errorf("%s does not lead to %q", selector, heading)
		}
		return err // also fails while there is no document between two views
	})
}

// fill replaces the content of a field with a text.
func (p *tab) fill(selector, text string) {
	p.t.Helper()
	p.focus(selector)
	p.run("fill "+selector, chromedp.Evaluate[chromedp.Void]("document.activeElement.select()"), chromedp.KeyEvent(text))
}

// awaitRows waits until the list of messages has the given number of rows.
func (p *tab) awaitRows(count int) {
	p.t.Helper()
	p.await(fmt.Sprintf("%d rows", count), fmt.Sprintf(`document.querySelectorAll(".stack tbody tr").length === %d`, count))
}
