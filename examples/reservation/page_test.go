package main_test

import (
	"bufio"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
)

func acceptsHTML(t *testing.T, address string) (status int, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address+"/", nil)
	noError(t, err)
	req.Header.Set("Accept", "text/html")
	resp, err := http.DefaultClient.Do(req)
	noError(t, err)
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	noError(t, err)
	return resp.StatusCode, string(text)
}

// The shop has its page in memory unless it is switched off, and a stream that does not hold up the end.
func TestShopPage_inMemory(t *testing.T) {
	t.Parallel()
	shop := start(t, nil)
	if status, body := acceptsHTML(t, shop.url); status != http.StatusOK || !strings.Contains(body, "Postgres off") || !strings.Contains(body, `href="/operator/"`) {
		t.Errorf("the page: %d %s", status, body)
	}
	awaitReady(t, shop.url)
	resp, err := http.Get(shop.url + "/shop/live?user=ada")
	noError(t, err)
	defer func() { _ = resp.Body.Close() }()
	if line := "the shop's page is " + shop.url + "/\n"; !strings.Contains(shop.stdout.String(), line) {
		t.Errorf("it says %q", shop.stdout)
	}
	shop.stop()
	if strings.Contains(shop.stderr.String(), "cut off") {
		t.Errorf("the stream held up the end: %s", shop.stderr)
	}

	bare := start(t, nil, "-page=false")
	if status, _ := acceptsHTML(t, bare.url); status != http.StatusNotFound {
		t.Errorf("without the page: %d", status)
	}
}

// TestShopPage_onServers wants nothing there that makes trouble, and the limits as Redis has them.
func TestShopPage_onServers(t *testing.T) {
	t.Parallel()
	shop := start(t, newServices(t).env(), "-backend=services", "-page")
	awaitReady(t, shop.url)
	if status, body := acceptsHTML(t, shop.url); status != http.StatusOK || strings.Contains(body, "trials") || strings.Contains(body, "/operator/") {
		t.Errorf("the page: %d %s", status, body)
	}
	for _, path := range []string{"/shop/poison", "/shop/slow", "/shop/outage"} {
		if status := pressed(t, shop.url+path, url.Values{"on": {"true"}}); status != http.StatusNotFound {
			t.Errorf("%s: %d", path, status)
		}
	}
	newClient(t, shop.url).newEvent(`{"name":"Concert","seats":50}`)
	resp, err := http.Get(shop.url + "/shop/live?user=nobody")
	noError(t, err)
	defer func() { _ = resp.Body.Close() }()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
			if !strings.Contains(data, `"name":"user","left":10`) || !strings.Contains(data, `"name":"global","left":999`) || strings.Contains(data, `"trials"`) {
				t.Errorf("the stream tells %s", data)
			}
			break
		}
	}
	shop.stop()
}

// pressed does what a button of the page does, and returns the status.
func pressed(t *testing.T, address string, fields url.Values) int {
	t.Helper()
	resp, err := http.PostForm(address, fields)
	noError(t, err)
	defer func() { _ = resp.Body.Close() }()
	return resp.StatusCode
}
