package browser_test

import (
	"fmt"
	"html"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/operator"
)

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
