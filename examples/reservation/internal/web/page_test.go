package web_test

import (
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/examples/reservation/internal/web"
)

func TestHomeIsForBrowsers(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	browser := s.do(http.MethodGet, "/", "", "Accept", "text/html,application/xhtml+xml,*/*;q=0.8")
	if browser.StatusCode != http.StatusOK || !strings.HasPrefix(browser.Header.Get("Content-Type"), "text/html") {
		t.Errorf("a browser is answered %d, %s", browser.StatusCode, browser.Header.Get("Content-Type"))
	}
	if other := s.do(http.MethodGet, "/", "", "Accept", "*/*"); other.StatusCode != http.StatusNotFound || !strings.Contains(other.body, "NOT_FOUND") {
		t.Errorf("others are answered %d, %s", other.StatusCode, other.body)
	}
	if post := s.do(http.MethodPost, "/", "", "Accept", "text/html"); post.StatusCode != http.StatusNotFound {
		t.Errorf("a POST is answered %d", post.StatusCode)
	}
	if browser.Header.Get("Vary") != "Accept" {
		t.Errorf("Vary is %q", browser.Header.Get("Vary"))
	}
}

// TestPageLoadsNothingFromElsewhere loads all that the page names, and wants it to be the page's own.
func TestPageLoadsNothingFromElsewhere(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	home := s.do(http.MethodGet, "/", "", "Accept", "text/html")
	if policy := home.Header.Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") {
		t.Errorf("policy %q", policy)
	}
	if regexp.MustCompile(`<style|style=|<script>|\son[a-z]+=`).MatchString(home.body) {
		t.Error("the page holds what its policy forbids")
	}
	names := regexp.MustCompile(`(?:src|href)="(/shop/[^"]*)"`).FindAllStringSubmatch(home.body, -1)
	modules := regexp.MustCompile(`from "\./([a-z]+\.js)"`)
	seen := map[string]bool{}
	var load func(path string)
	load = func(path string) {
		if seen[path] {
			return
		}
		seen[path] = true
		file := s.do(http.MethodGet, path, "")
		if file.StatusCode != http.StatusOK || file.Header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("%s: %d, %v", path, file.StatusCode, file.Header)
		}
		for _, m := range modules.FindAllStringSubmatch(file.body, -1) {
			load("/shop/" + m[1])
		}
	}
	for _, name := range names {
		load(name[1])
	}
	if len(seen) != 7 {
		t.Errorf("loaded %v, want a style, an icon and five scripts", seen)
	}
}

func TestWithoutTrialsNothingCanBeBroken(t *testing.T) {
	t.Parallel()
	s := newShop(t, func(c *web.Config) { c.Trials, c.Servers, c.Operator = nil, nil, "/operator/" })
	home := s.do(http.MethodGet, "/", "", "Accept", "text/html").body
	if strings.Contains(home, "poison") || strings.Contains(home, "Postgres off") {
		t.Error("the page has buttons that do nothing")
	}
	if !strings.Contains(home, `href="/operator/"`) {
		t.Error("the page does not lead to the operator's")
	}
	for _, path := range []string{"/shop/poison", "/shop/slow", "/shop/outage"} {
		if a := s.press(path, nil); a.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %d", path, a.StatusCode)
		}
	}
	if with := newShop(t).do(http.MethodGet, "/", "", "Accept", "text/html").body; strings.Contains(with, "/operator/") {
		t.Error("the page leads to an operator's page that is not there")
	}
}

func TestAPIAnswersAsWithoutPage(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, path := range []string{"/api//events", "/api/events/", "/nothing"} {
		if a := s.do(http.MethodGet, path, "", "Accept", "text/html"); a.StatusCode != http.StatusNotFound || !strings.Contains(a.body, "NOT_FOUND") {
			t.Errorf("%s: %d %s", path, a.StatusCode, a.body)
		}
	}
}

func TestConfigIsComplete(t *testing.T) {
	t.Parallel()
	if _, err := web.New(web.Config{}); err == nil {
		t.Error("a page without a shop")
	}
}
