package browser_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha512"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/operator"
)

var schemes = []string{"light", "dark"}

// TestShopIsAccessible checks the page with everything on it, at the width of a desktop and of a phone.
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

// TestOperatorIsAccessible checks every view of the operator's page at the width of a desktop and of a phone: also a letter
// with its body, the preview of a change, and a running change.
func TestOperatorIsAccessible(t *testing.T) {
	t.Parallel()
	v := openShop(t)
	const letters = 3
	v.poison(letters)
	v.click(`nav a[href="/operator/"]`)
	v.awaitText("h1", "Status")
	for _, view := range []string{"", "groups", "dead-letters", "waiting", "running", "limits?key=ada", "nowhere"} {
		v.open(v.url + "/operator/" + view)
		v.wantUsable("the view " + view)
	}
	v.open(v.url + "/operator/dead-letters")
	v.follow("tbody a", "Dead letter")
	v.wantUsable("a letter")
	v.follow(`a[href*="body=1"]`, "Dead letter")
	v.wantUsable("a letter with its body")

	v.open(v.url + "/operator/preview?what=drop")
	v.wantUsable("a preview of a drop")
	v.open(v.url + "/operator/preview?what=retry")
	v.awaitText(".headline", fmt.Sprint(letters, " would be sent again"))
	v.wantUsable("a preview of a retry")
	v.fill(`textarea[name="patch"]`, `{"fixed":true}`) // wantUsable has unfolded it
	v.fill(`input[name="rate"]`, "0.001")
	v.fill(`input[name="reason"]`, "a slow one")
	v.follow(`button[formaction="preview"]`, "Preview")
	v.wantUsable("a preview of an edit")
	v.follow(".actions button", "Change")
	v.awaitText("#live", fmt.Sprintf("1 of %d", letters))
	v.wantUsable("a change that runs")
	v.follow(`form[action="stop"] button`, "Change")
	v.awaitText("#live", "Ended")
	v.wantUsable("a change that was stopped")
	v.open(v.url + "/operator/log")
	v.awaitText("tbody", "a slow one")
	v.wantUsable("the log")
}

// TestLongNamesFitAPhone shows names of maximum length that cannot be broken between words.
func TestLongNamesFitAPhone(t *testing.T) {
	t.Parallel()
	const long = 64
	name := strings.Repeat("n", 2*long)
	url := site(t, operator.Config{Consumers: []operator.Consumer{{Name: strings.Repeat("c", long), Consumer: consumerOf(t, name, name)}}})
	p := newTab(t)
	for _, view := range []string{"", "groups", "dead-letters", "preview?what=drop"} {
		p.open(url + view)
		p.wantUsable("the view " + view)
	}
	p.fill(`input[name="reason"]`, strings.Repeat("r", 10*long))
	p.follow(".actions button", "Change")
	p.awaitText("#live", "2 dropped")
	p.wantUsable("a change")
	p.open(url + "log")
	p.wantUsable("the log")
}

// TestPagesAreTurned pages through the letters of an outbox by keyboard, and back to the first page.
func TestPagesAreTurned(t *testing.T) {
	t.Parallel()
	url := site(t, operator.Config{Outboxes: []operator.Outbox{{Store: postgresOutbox(t, 5)}}})
	p := newTab(t)
	p.open(url + "dead-letters?limit=2")
	p.awaitText("main", "The oldest 2.")
	p.wantUsable("the first page")
	for _, rows := range []int{2, 1} {
		p.follow(`a[rel="next"]`, "Dead letters")
		p.awaitRows(rows)
	}
	p.await("the last page has no next one", `!document.querySelector('a[rel="next"]')`)
	p.wantUsable("the last page")
	p.follow(".pages a", "Dead letters")
	p.awaitText("main", "The oldest 2.")
}

// wantUsable checks the page with everything unfolded, in light and dark, on a desktop and on a phone, and walks over it by
// keyboard.
func (p *tab) wantUsable(what string) {
	p.t.Helper()
	p.run("unfold", chromedp.Evaluate[chromedp.Void](`document.querySelectorAll("details").forEach((d) => { d.open = true })`))
	for _, scheme := range schemes {
		p.scheme(scheme)
		p.run("a desk", chromedp.EmulateViewport(1280, 1400))
		p.wantAccessible(what + ", " + scheme + ", wide")
		p.run("a phone", chromedp.EmulateViewport(360, 800))
		if wide := ask(p, "width", chromedp.Evaluate[string](tooWide)); wide != "" {
			p.t.Errorf("%s, %s: wider than a phone are %s", what, scheme, wide)
		}
		p.wantAccessible(what + ", " + scheme + ", narrow")
	}
	p.wantReachable(what)
}

// tooWide lists the elements that make a page scroll sideways.
const tooWide = `document.documentElement.scrollWidth <= innerWidth ? "" :
	[...document.querySelectorAll("body *")].filter((e) => !e.matches(".wide *") && e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML.slice(0, 100)).join("; ")`

// controls are the visible interactive elements, and regions that may be wider than the page.
const controls = `[...document.querySelectorAll("a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex]")].filter((e) => e.checkVisibility())`

// wantReachable fails for each control that the tab key does not reach.
func (p *tab) wantReachable(what string) {
	p.t.Helper()
	p.run("begin at the top", chromedp.Evaluate[chromedp.Void](`document.activeElement.blur(); getSelection().collapse(document.body, 0)`))
	count := ask(p, "count", chromedp.Evaluate[int](controls+".length"))
	reached := map[int]bool{}
	for range count + 1 {
		p.run("tab", chromedp.KeyEvent(kb.Tab))
		reached[ask(p, "focus", chromedp.Evaluate[int](controls+".indexOf(document.activeElement)"))] = true
	}
	for i := range count {
		if !reached[i] {
			p.t.Errorf("%s: the tab key does not reach %s", what, ask(p, "control", chromedp.Evaluate[string](fmt.Sprintf("%s[%d]?.outerHTML", controls, i))))
		}
	}
}

const (
	axeURL = "https://registry.npmjs.org/axe-core/-/axe-core-4.10.3.tgz"
	// axeSum is the SHA-512 of the archive, from the registry.
	axeSum = "Xm7bpRXnDSX2YE2YFfBk2FnF0ep6tmG7xPh8iHee8MIcrgq762Nkce856dYtJYLkuIoYZvGfTs/PbZhideTcEg=="
	// maxArchive bounds the download, and the script in it.
	maxArchive = 8 << 20
)

// axeSource returns the script of axe-core, from the cache or from the npm registry.
var axeSource = sync.OnceValues(func() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	path := filepath.Join(cache, "holdfast", "axe-core-4.10.3.tgz")
	archive, err := os.ReadFile(path)
	if err != nil || !genuine(archive) {
		if archive, err = download(axeURL); err != nil {
			return "", err
		}
		if !genuine(archive) {
			return "", fmt.Errorf("%s has another checksum", axeURL)
		}
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, archive, 0o644)); err != nil {
			return "", err
		}
	}
	return unpack(archive, "package/axe.min.js")
})

func genuine(archive []byte) bool {
	sum := sha512.Sum512(archive)
	return base64.StdEncoding.EncodeToString(sum[:]) == axeSum
}

func download(url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, resp.Status)
	}
	return io.ReadAll(io.LimitReader(resp.Body, maxArchive))
}

// unpack returns one file of a .tgz.
func unpack(archive []byte, name string) (string, error) {
	plain, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		return "", err
	}
	for files := tar.NewReader(plain); ; {
		header, err := files.Next()
		if err != nil {
			return "", fmt.Errorf("%s: %w", name, err)
		}
		if header.Name == name {
			text, err := io.ReadAll(io.LimitReader(files, maxArchive))
			return string(text), err
		}
	}
}

// wantAccessible fails for every violation that axe-core finds in the current page.
func (p *tab) wantAccessible(what string) {
	p.t.Helper()
	source, err := axeSource()
	if err != nil {
		testenv.Missing(p.t, "axe-core: "+err.Error())
	}
	// DevTools inject the script, because the page's policy allows only its own scripts.
	p.run("axe", chromedp.Evaluate[chromedp.Void](source))
	const check = `axe.run(document).then((r) => r.violations.map((v) =>
		v.id + ", " + v.nodes.length + " times, as in " + v.nodes[0].target + ": " + v.nodes[0].failureSummary))`
	for _, v := range ask(p, "axe", chromedp.Evaluate[[]string](check, chromedp.EvalAwaitPromise)) {
		p.t.Errorf("%s: %s", what, v)
	}
}
