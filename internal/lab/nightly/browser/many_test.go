package browser_test

import (
	"fmt"
	"html"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// TestProgressOfManyIsShown has 10,000 dead letters retried, edited or dropped, and looks at the bar while half of them
// are.
func TestProgressOfManyIsShown(t *testing.T) {
	t.Parallel()
	const letters = 10_000
	for name, newConsumer := range map[string]func(*testing.T, int) consumer{"memory": memoryConsumer, "RabbitMQ": rabbitConsumer, "Redis": redisConsumer} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, g := newConsumer(t, letters), newGate(t, letters/2)
			showsProgress(t, operator.Config{Consumers: []operator.Consumer{{Name: "billing", Consumer: gatedConsumer{c, g}}}}, g, "retry", "")
			stats, err := c.Stats(t.Context())
			if err != nil || stats.Waiting != letters {
				t.Errorf("%+v, %v: want %d to be processed", stats, err, letters)
			}
		})
	}
	for name, c := range map[string]struct {
		what, patch string
		ready       int
	}{
		"outbox":         {"retry", "", letters},
		"outbox, edited": {"retry", `{"mended":true}`, letters},
		"outbox, drop":   {"drop", "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, g := postgresOutbox(t, letters), newGate(t, letters/2)
			showsProgress(t, operator.Config{Outboxes: []operator.Outbox{{Store: gatedOutbox{store, g}}}}, g, c.what, c.patch)
			depth, err := store.Depth(t.Context())
			if err != nil || depth.Ready != c.ready || depth.Dead != 0 {
				t.Errorf("%+v, %v: want %d to be published", depth, err, c.ready)
			}
		})
	}
}

// showsProgress retries or drops dead letters, twice as many as pass the gate at first, with a patch or as they are.
func showsProgress(t *testing.T, cfg operator.Config, g *gate, what, patch string) {
	t.Helper()
	letters := 2 * g.middle
	would := map[string]string{"retry": " would be sent again", "drop": " would be deleted for ever"}[what]
	did := map[string]string{"retry": " retried", "drop": " dropped"}[what]
	p := newTab(t)
	p.open(site(t, cfg) + "preview?what=" + what)
	p.awaitText(".headline", fmt.Sprint(letters, would))
	if patch != "" {
		p.press("summary", kb.Enter)
		p.fill(`textarea[name="patch"]`, patch)
		p.follow(`button[formaction="preview"]`, "Before it begins")
		p.awaitText("pre", "mended")
	}
	p.follow(".actions button", "A change")
	p.awaitText("#live", fmt.Sprintf("%d of %d", g.middle, letters))
	p.await("the bar is half full", `document.querySelector("progress").position === 0.5`)
	g.goOn()
	p.awaitText("#live", "Ended")
	p.awaitText("#live", fmt.Sprint(letters, did))
	p.await("the bar is full", `document.querySelector("progress").position === 1`)
	p.follow(`a[href="groups"]`, "Dead letters by kind")
	p.awaitText("main", "There is none.")
}

// TestHundredThousandDeadLetters asks for the views of the page where an outbox and a consumer have so many, and logs how
// long each takes. Kinds on RabbitMQ take longest: all letters are read, for which a page has a minute. There are fewer, so
// that the minute is enough on a machine that is busy, and no preview, for which they would be read again.
func TestHundredThousandDeadLetters(t *testing.T) {
	t.Parallel()
	const letters, onRabbitMQ = 100_000, 20_000
	t.Run("outbox", func(t *testing.T) {
		t.Parallel()
		url := site(t, operator.Config{Outboxes: []operator.Outbox{{Store: postgresOutbox(t, letters)}}})
		wantViews(t, url, letters, fmt.Sprintf(">%d<", letters), "The oldest %d.")
		wantView(t, url+"letters?error=order+99999", "1 in all")
		wantAllPages(t, url, letters)
		wantView(t, url+"preview?what=retry", `<span class="count">100000</span>`)
		wantView(t, url+"preview?what=drop&name=order.kind-1", ">5000<")
	})
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		url := siteOfConsumer(t, redisConsumer(t, letters), letters)
		wantView(t, url+"preview?what=retry", `<span class="count">100000</span>`)
	})
	t.Run("RabbitMQ", func(t *testing.T) {
		t.Parallel()
		siteOfConsumer(t, rabbitConsumer(t, onRabbitMQ), onRabbitMQ)
	})
}

// siteOfConsumer serves the page of a consumer with so many dead letters, and wants its views.
func siteOfConsumer(t *testing.T, c consumer, letters int) (url string) {
	t.Helper()
	url = site(t, operator.Config{Consumers: []operator.Consumer{{Name: "billing", Consumer: c}}})
	wantViews(t, url, letters, fmt.Sprintf("unrecoverable %d<", letters), "The first %d that were found.")
	wantView(t, url+"letters?name=order.kind-1", "The first 100 that were found.")
	return url
}

// wantAllPages goes through all letters of an outbox from page to page.
func wantAllPages(t *testing.T, url string, letters int) {
	t.Helper()
	const perPage = 1000
	next := regexp.MustCompile(`rel="next" href="([^"]*)"`)
	address, seen := fmt.Sprint("letters?from=outbox&limit=", perPage), map[string]bool{}
	for range letters / perPage {
		body := wantView(t, url+address, "")
		for _, id := range regexp.MustCompile(`value="outbox/([^"]*)"`).FindAllStringSubmatch(body, -1) {
			seen[id[1]] = true
		}
		if link := next.FindStringSubmatch(body); link != nil {
			address = html.UnescapeString(link[1])
		}
	}
	if len(seen) != letters {
		t.Errorf("on all pages are %d letters, want %d", len(seen), letters)
	}
}

// wantViews wants what is the same of an outbox and a consumer with so many dead letters.
func wantViews(t *testing.T, url string, letters int, status, begin string) {
	t.Helper()
	wantView(t, url, status)
	wantView(t, url+"letters", fmt.Sprintf(begin, 100))
	wantView(t, url+"letters?limit=1000", fmt.Sprintf(begin, 1000))
	wantView(t, url+"groups", fmt.Sprintf(`<span class="count">%d</span>`, letters/kinds))
}

// TestViewersSeeAllLetters has some look at the same letters at the same time, which a queue hands out once.
func TestViewersSeeAllLetters(t *testing.T) {
	t.Parallel()
	url := site(t, operator.Config{Consumers: []operator.Consumer{{Name: "billing", Consumer: rabbitConsumer(t, 1000)}}})
	var viewers sync.WaitGroup
	for range 2 {
		for path, part := range map[string]string{"groups": `<span class="count">50</span>`, "preview?what=retry": `<span class="count">1000</span>`} {
			viewers.Go(func() {
				if _, err := view(t, url+path, part); err != nil {
					t.Error(err)
				}
			})
		}
	}
	viewers.Wait()
}

// wantView wants a view to be answered without a problem, such as that the page has waited for a minute, in at most a
// megabyte. A busy machine may need several requests.
func wantView(t *testing.T, url, part string) (body string) {
	t.Helper()
	testenv.Eventually(t, func() (err error) {
		body, err = view(t, url, part)
		return err
	})
	return body
}

// view asks for a view once. One that has not read all letters within its minute, on a busy machine, says so.
func view(t *testing.T, url, part string) (string, error) {
	t.Helper()
	const most = 1 << 20
	began := time.Now()
	resp, err := http.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, most+1))
	t.Logf("%5.2f s %7d bytes %s", time.Since(began).Seconds(), len(body), resp.Request.URL.RequestURI())
	text := string(body)
	if err != nil || resp.StatusCode != http.StatusOK || len(body) > most || strings.Contains(text, `class="problem"`) || !strings.Contains(text, part) {
		return "", fmt.Errorf("%s: %s, %v, %d bytes, want %s in it: %.4000s", url, resp.Status, err, len(body), part, text)
	}
	return text, nil
}
