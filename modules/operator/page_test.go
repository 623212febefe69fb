package operator_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/command"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/ratelimit"
)

// everything allows everything.
func everything(*http.Request) (operator.Access, error) {
	return operator.Access{By: "ada", Bodies: true, Change: true}, nil
}

// site visits a page below a prefix, like a browser without scripts.
type site struct {
	*rig
	page *page.Page
	url  string // of the page, with its slash
}

func newSite(t *testing.T, cfg page.Config) *site {
	t.Helper()
	return serve(t, newRig(t), cfg)
}

// serve serves the page of a rig.
func serve(t *testing.T, r *rig, cfg page.Config) *site {
	t.Helper()
	s := &site{rig: r}
	s.page = must(page.New(r.cfg, cfg))(t)
	mux := http.NewServeMux()
	mux.Handle("/at/operator/", http.StripPrefix("/at/operator", s.page))
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	t.Cleanup(s.page.Close)
	s.url = server.URL + "/at/operator/"
	return s
}

// get loads an address of the page. The answer must have the code and show all parts.
func (s *site) get(t *testing.T, address string, code int, parts ...string) string {
	t.Helper()
	return s.shows(t, must(http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+address, nil))(t), code, parts...)
}

// post sends a form to an address of the page.
func (s *site) post(t *testing.T, address string, form url.Values, code int, parts ...string) string {
	t.Helper()
	r := must(http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+address, strings.NewReader(form.Encode())))(t)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	return s.shows(t, r, code, parts...)
}

var tags = regexp.MustCompile(`<[^>]*>`)

// shows sends a request. A view that is still being read is requested again, as its script does.
func (s *site) shows(t *testing.T, r *http.Request, code int, parts ...string) string {
	t.Helper()
	answer := must(http.DefaultClient.Do(r))(t)
	body := string(must(io.ReadAll(answer.Body))(t))
	check(t, answer.Body.Close())
	if strings.Contains(body, " data-reload>") {
		time.Sleep(20 * time.Millisecond)
		return s.shows(t, r, code, parts...)
	}
	if answer.StatusCode != code {
		t.Errorf("%s %s: %d, want %d: %s", r.Method, r.URL, answer.StatusCode, code, body)
	}
	if answer.Header.Get("Content-Security-Policy") == "" || answer.Header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("%s: headers %v", r.URL, answer.Header)
	}
	text := html.UnescapeString(body)
	for _, part := range parts {
		if !strings.Contains(text, part) && !strings.Contains(tags.ReplaceAllString(text, ""), part) {
			t.Errorf("%s %s does not show %q: %s", r.Method, r.URL, part, body)
		}
	}
	return body
}

func TestPageShows(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: everything, Title: "the shop"})
	s.serves(t)
	s.get(t, "", 200, "the shop", "ada", "outbox", "billing", "unrecoverable 3", "holds", "0.0/s")
	s.get(t, "running", 200, "0 held", "default closed")
	s.get(t, "groups", 200, "no exchange a", "no handler for c", "Retry all")
	s.get(t, "groups?name=c", 200, "no handler for c", `<span class="count">2</span>`)
	s.get(t, "dead-letters?from=outbox", 200, "no exchange b", s.ids["a"].String())
	s.get(t, "dead-letters?error=nothing", 200, `class="empty"`)
	s.get(t, "waiting", 200, `class="empty"`)
	s.get(t, "retrying?from=outbox", 200, `class="empty"`)
	s.get(t, "dead-letters?name=c", 200, `<option value="a"></option>`, `<option value="permanent"></option>`) // from earlier views
	s.get(t, "log", 200, `class="empty"`)
	s.get(t, "limits?key=grace", 200, "user", "10")
	if body := s.get(t, "dead-letters?name=c&limit=1", 200, "Up to 1,000"); strings.Count(body, "checkbox") != 1 {
		t.Errorf("more than one is listed: %s", body)
	}
}

// The page shows a dead letter at once, its body and headers only on request.
func TestPage_deadLetter(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: everything, Mask: func(m operator.MaskedMessage) []byte {
		if m.Name == "d" {
			return nil
		}
		return []byte(strings.ReplaceAll(string(m.Body), "a", "*"))
	}})
	a := fmt.Sprintf("dead-letter?from=outbox&id=outbox/%s", s.ids["a"])
	if body := s.get(t, a, 200, "no exchange a", "key a", "Show body"); strings.Contains(body, "secret") || strings.Contains(body, "tenant") {
		t.Errorf("body or headers are shown without a request: %s", body)
	}
	s.get(t, a+"&body=1", 200, `"secret": "*"`, "tenant")
	s.get(t, fmt.Sprintf("dead-letter?from=outbox&id=outbox/%s&body=1", s.ids["b"]), 200, "cle*rs the screen")
	s.get(t, fmt.Sprintf("dead-letter?from=billing&id=billing/%s&body=1", s.ids["d"]), 200, "hidden by the service")
	s.get(t, "dead-letter?from=outbox&id=outbox/00000000-0000-7000-8000-000000000000", 404, "no such dead letter")
}

// Without Authorize the page changes nothing and shows no body.
func TestPageReadOnly(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{})
	for _, address := range []string{"", "groups", "dead-letters", "dead-letter?from=outbox&id=outbox/" + s.ids["a"].String() + "&body=1", "limits?key=ada"} {
		if body := s.get(t, address, 200, "read only"); strings.Contains(body, "preview") || strings.Contains(body, "secret") || strings.Contains(body, "apply") {
			t.Errorf("%s: %s", address, body)
		}
	}
	s.get(t, "preview?what=drop", 403)
	s.post(t, "apply", url.Values{"what": {"drop"}}, 403)
	s.post(t, "reset", url.Values{"key": {"ada"}}, 403)
	s.post(t, "pause", url.Values{"what": {"pause"}, "part": {"outbox"}}, 403)
	s.wants(t, 0, []string{"outbox", "dead"}, "no exchange a")
}

func TestPageRefuses(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: func(r *http.Request) (operator.Access, error) {
		if r.Header.Get("X-Key") == "" {
			return everything(r)
		}
		return operator.Access{Change: true}, errors.New("wrong key")
	}})
	for _, address := range []string{
		"dead-letters?from=nobody", "dead-letters?since=soon", "dead-letters?limit=0", "dead-letters?limit=1001", "dead-letters?id=outbox/1",
		"dead-letters?id=nobody/" + s.ids["a"].String(), "preview?what=burn", "preview?what=retry&rate=fast", "preview?what=retry&rate=-1",
		"preview?what=retry&rate=NaN", "preview?what=retry&chosen=1", "preview?what=drop&reason=" + strings.Repeat("x", 1001),
	} {
		s.get(t, address, 400)
	}
	s.get(t, "dead-letter?from=outbox", 400)
	s.get(t, "nowhere", 404)
	s.get(t, "job?id=1", 404)
	s.get(t, "progress?id=1", 404)
	s.post(t, "reset", url.Values{}, 400)
	drop := url.Values{"what": {"drop"}}
	r := must(http.NewRequestWithContext(t.Context(), http.MethodPost, s.url+"apply", strings.NewReader(drop.Encode())))(t)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	r.Header.Set("Sec-Fetch-Site", "cross-site")
	s.shows(t, r, 403, "Another site")
	r = must(http.NewRequestWithContext(t.Context(), http.MethodGet, s.url, nil))(t)
	r.Header.Set("X-Key", "wrong")
	s.shows(t, r, 403)
	s.wants(t, 0, []string{"outbox", "dead"}, "no exchange a")
}

func TestPageLimits(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: everything})
	_, err := s.limiter.Allow(t.Context(), ratelimit.Charge{Limit: ratelimit.Limit{Name: "user", Max: 10}, Key: "grace"})
	check(t, err)
	s.get(t, "limits?key=grace", 200, `value="9"`)
	s.post(t, "reset", url.Values{"key": {"grace"}, "reason": {"a mistake"}}, 200, "are reset", `value="10"`)
	s.get(t, "log", 200, "limits reset", "a mistake")
}

// The page, the status on a terminal, its exit code and its JSON have the same verdict.
func TestVerdict_isTheSameEverywhere(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Title: "shop"})
	s.get(t, "", 200, "2 problems", "outbox: 2 dead letters", "billing: 3 dead letters", "(2) Status · shop", "icon-bad.svg", "#holdfastinboxdeadletters")
	s.get(t, "log", 200, "(2) Log · shop")
	s.wants(t, 1, []string{"status"}, "2 problems  2", "\n! outbox: 2 dead letters (HoldfastOutboxDeadLetters)\n! billing: 3 dead letters (HoldfastInboxDeadLetters)\n")
	s.wants(t, 1, []string{"status", "--json"}, `"good": false`, `"text": "3 dead letters"`)
	s.wants(t, 0, []string{"drop", "--all", "--by=ada"})
	s.wants(t, 0, []string{"status"}, "All good  2")
	s.wants(t, 0, []string{"status", "--json"}, `"good": true`, `"problems": []`)
	testenv.Eventually(t, func() error {
		body := s.get(t, "", 200)
		for _, part := range []string{"All good", `href="icon.svg"`, "<title>Status · shop</title>"} {
			if !strings.Contains(body, part) {
				return fmt.Errorf("the page does not show %q: %s", part, body)
			}
		}
		return nil
	})
}

// Every link and form of every view stays below the prefix.
func TestPageLinks(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: everything})
	links := regexp.MustCompile(`(?:href|src|action|data-stream)="([^"]*)"`)
	seen, next := map[string]bool{}, []string{""}
	for len(next) > 0 {
		address := next[0]
		next = next[1:]
		body := s.get(t, address, 200)
		for _, link := range links.FindAllStringSubmatch(body, -1) {
			to := strings.TrimPrefix(html.UnescapeString(link[1]), "./")
			if strings.ContainsAny(to, "#") || strings.HasPrefix(to, "?") || to == "live" || to == "apply" || to == "reset" || to == "pause" || seen[to] {
				continue
			}
			if strings.HasPrefix(to, "https://github.com/holdfast-go/holdfast/blob/main/modules/operator/observability/runbooks.md") {
				continue
			}
			if strings.Contains(to, ":") || strings.HasPrefix(to, "/") {
				t.Errorf("%s leads out of the page: %s", address, to)
				continue
			}
			seen[to] = true
			if to != "preview" { // a form, which needs its fields
				next = append(next, to)
			}
		}
	}
	for _, want := range []string{"style.css", "page.js", "icon-bad.svg", "groups", "dead-letters", "waiting", "limits", "log", "preview"} {
		if !seen[want] {
			t.Errorf("nothing leads to %s", want)
		}
	}
}

// A live page receives the state, until the page is closed.
func TestPageLive(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{})
	answer := must(http.Get(s.url + "live"))(t)
	defer answer.Body.Close()
	if kind := answer.Header.Get("Content-Type"); kind != "text/event-stream" {
		t.Errorf("it is %s", kind)
	}
	lines := bufio.NewScanner(answer.Body)
	for lines.Scan() && !strings.Contains(lines.Text(), "billing") {
		if text := lines.Text(); text != "" && !strings.HasPrefix(text, "data: ") {
			t.Errorf("unexpected line: %q", text)
		}
	}
	check(t, lines.Err())
	s.page.Close()
	_, err := io.Copy(io.Discard, answer.Body)
	check(t, err)
}

// The page is at an address with a final slash. Requests without it are redirected.
func TestPageWithoutSlash(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{})
	w := httptest.NewRecorder()
	r := httptest.NewRequest(http.MethodGet, "http://x/deep/ops", nil)
	r.URL.Path = "/"
	s.page.ServeHTTP(w, r)
	if w.Code != http.StatusTemporaryRedirect || w.Header().Get("Location") != "./ops/" {
		t.Errorf("%d to %q", w.Code, w.Header().Get("Location"))
	}
	w = httptest.NewRecorder()
	http.StripPrefix("/deep/ops/", s.page).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://x/deep/ops/groups", nil))
	if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), "no exchange a") {
		t.Errorf("%d: %s", w.Code, w.Body)
	}
}

// The command serves the page until it is interrupted. It rejects other host names.
func TestPageCommand(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	out, in := io.Pipe()
	code := make(chan int, 1)
	go func() {
		code <- command.Run(ctx, r.cfg, []string{"page", "--addr=127.0.0.1:0", "--change", "--by=ada"}, in, io.Discard)
	}()
	address := must(bufio.NewReader(out).ReadString('\n'))(t)
	s := &site{rig: r, url: strings.TrimSpace(address)}
	s.get(t, "groups", 200, "Retry all", "ada")
	request := must(http.NewRequestWithContext(t.Context(), http.MethodGet, s.url, nil))(t)
	request.Host = "rebound.example"
	s.shows(t, request, 403)
	interrupt()
	if got := <-code; got != 0 {
		t.Errorf("it exits with %d", got)
	}
	for _, args := range [][]string{{"page", "--addr=nowhere"}, {"page", "--change", "--by="}, {"page", "--by=a\nb"}} {
		if got, _, _ := r.run(t, args...); got != 2 {
			t.Errorf("%q exits with %d", args, got)
		}
	}
}

var hidden = regexp.MustCompile(`<input type="hidden" name="([^"]*)" value="([^"]*)">`)

// applied previews a change, starts it with the preview's form, and waits for its end.
func (s *site) applied(t *testing.T, address string, more url.Values, parts ...string) {
	t.Helper()
	form := url.Values{}
	for _, field := range hidden.FindAllStringSubmatch(s.get(t, address, 200, parts...), -1) {
		form.Add(field[1], html.UnescapeString(field[2]))
	}
	for field, values := range more {
		form[field] = values
	}
	s.job(t, form)
}

// job starts a change and waits for its end.
func (s *site) job(t *testing.T, form url.Values, parts ...string) {
	t.Helper()
	body := s.post(t, "apply", form, 200, append(parts, "started by ada")...)
	id := regexp.MustCompile(`progress\?id=(\d+)`).FindStringSubmatch(body)
	testenv.Eventually(t, func() error {
		if id != nil && !strings.Contains(body, "Ended") {
			body = s.get(t, "job?id="+id[1], 200)
			return fmt.Errorf("the change does not end: %s", body)
		}
		return nil
	})
}

// ahead is a consumer with one dead letter, of a host whose clock is three minutes ahead.
type ahead struct {
	gone
	noLetters
	failed time.Time
}

func (a ahead) DeadLetters() inbox.DeadLetters { return a }

func (a ahead) Groups(context.Context, inbox.Filter) ([]inbox.Group, error) {
	return []inbox.Group{{Fingerprint: "f", Count: 1, Last: a.failed}}, nil
}

func (a ahead) Replay(_ context.Context, f inbox.Filter, _ inbox.Replay) (r inbox.Replayed, err error) {
	if f.FailedBefore.After(a.failed) {
		r.Returned = 1
	}
	return r, nil
}

// A preview counts what its viewer has seen, if a clock is ahead, too.
func TestPageChanges_clockAhead(t *testing.T) {
	t.Parallel()
	s := serve(t, &rig{cfg: operator.Config{Consumers: []operator.Consumer{{Name: "mail", Consumer: ahead{failed: time.Now().Add(3 * time.Minute)}}}}}, page.Config{Authorize: everything})
	s.get(t, "groups", 200, "Retry all")
	s.get(t, "preview?what=retry&from=mail&group=f", 200, `<span class="count">1</span>`)
}

func TestPageChanges(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: everything})
	group := regexp.MustCompile(`preview\?([^"]*group=[^"]*what=retry)`).FindStringSubmatch(s.get(t, "groups?name=c", 200))
	if group == nil {
		t.Fatal("a group cannot be retried")
	}
	s.applied(t, "preview?"+html.UnescapeString(group[1]), url.Values{"reason": {"handler deployed"}}, "2 would be sent again", "billing: 2")
	s.get(t, "groups?name=c", 200, `class="empty"`)
	s.applied(t, "preview?what=drop&chosen=1&id=outbox/"+s.ids["a"].String()+"&id=billing/"+s.ids["d"].String(), nil, "2 would be deleted")
	s.get(t, "dead-letters", 200, "no exchange b", "1 in all")
	for _, asked := range []string{"", "&until=0s", "&until=2999-01-01T00:00:00Z", "&since=1h&until=10ms"} {
		found := regexp.MustCompile(`name="(?:since|until)" value="([^"]*)"`).FindAllStringSubmatch(s.get(t, "preview?what=retry"+asked, 200), -1)
		if len(found) != 1+strings.Count(asked, "since") {
			t.Errorf("with %q the form has %q", asked, found)
		}
		for _, field := range found {
			if at := must(time.Parse(time.RFC3339, field[1]))(t); at.After(time.Now()) {
				t.Errorf("with %q failures until %v, in the future, would be retried without a preview", asked, at)
			}
		}
	}
	s.applied(t, "preview?what=retry&matching=1", url.Values{"rate": {"50"}}, "1 would be sent again")
	s.get(t, "dead-letters", 200, `class="empty"`)
	s.get(t, "waiting?from=outbox", 200, "key b")
	s.get(t, "log", 200, "handler deployed", "retry", "drop", "ada", "Started here")
}

// Marked dead letters may be too many for an address. They count only with the button for marked ones.
func TestPageMarks(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: everything})
	s.get(t, "dead-letters", 200, `<form method="post" action="preview">`)
	marked := url.Values{"what": {"retry"}, "id": {"outbox/" + s.ids["a"].String(), "outbox/" + s.ids["b"].String()}}
	marked.Set("chosen", "1")
	s.post(t, "preview", marked, 200, "2 would be sent again")
	marked.Del("chosen")
	marked.Set("matching", "1")
	s.post(t, "preview", marked, 200, "5 would be sent again")
}

// A stopped change ends, and shows who stopped it. Only users who may change something may stop it.
func TestPageStops(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	slow := slowConsumer{r.cfg.Consumers[0].Consumer, make(chan struct{}, 1)}
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: slow}}
	s := serve(t, r, page.Config{Authorize: func(r *http.Request) (operator.Access, error) {
		return operator.Access{By: r.FormValue("as"), Change: r.FormValue("as") != ""}, nil
	}})
	s.post(t, "apply", url.Values{"what": {"drop"}, "from": {"billing"}, "as": {"ada"}}, 200, "started by ada")
	<-slow.started
	if body := s.get(t, "job?id=1", 200); strings.Contains(body, "Stop") {
		t.Error("a reader sees the button to stop it")
	}
	s.post(t, "stop", url.Values{"id": {"1"}}, 403)
	s.get(t, "job?id=1&as=bob", 200, `action="stop"`)
	s.post(t, "stop", url.Values{"id": {"1"}, "as": {"bob"}}, 200, "stopped by bob")
	testenv.Eventually(t, func() error {
		if body := s.get(t, "job?id=1", 200); !strings.Contains(body, "Ended") {
			return errors.New("it does not end")
		}
		return nil
	})
	s.get(t, "job?id=1", 200, "1 dropped", "stopped by bob")
	s.post(t, "stop", url.Values{"id": {"2"}, "as": {"bob"}}, 404)
}

// Close stops running changes. The log records how far they came.
func TestPageCloseWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	slow := slowConsumer{r.cfg.Consumers[0].Consumer, make(chan struct{}, 2)}
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: slow}}
	s := serve(t, r, page.Config{Authorize: everything})
	s.post(t, "apply", url.Values{"what": {"retry"}, "from": {"billing"}}, 200, "started by ada", "billing: 0 so far")
	s.post(t, "apply", url.Values{"what": {"drop"}, "from": {"billing"}}, 200, "started by ada", "billing: 0 so far")
	<-slow.started
	<-slow.started
	s.page.Close()
	for _, a := range must(r.cfg.Log.List(t.Context(), operator.LogFilter{Limit: 2}))(t) {
		if a.Count == nil || *a.Count != 1 || a.Failure == "" {
			t.Errorf("%+v", a)
		}
	}
	s.post(t, "apply", url.Values{"what": {"retry"}}, 503, "shutting down")
}

// slowConsumer has dead letters whose changes last until they are cancelled, and a little longer.
type slowConsumer struct {
	operator.DeadLetterer
	started chan struct{}
}

func (c slowConsumer) DeadLetters() inbox.DeadLetters {
	return slowLetters{c.DeadLetterer.DeadLetters(), c.started}
}

type slowLetters struct {
	inbox.DeadLetters
	started chan struct{}
}

func (l slowLetters) Replay(ctx context.Context, _ inbox.Filter, _ inbox.Replay) (inbox.Replayed, error) {
	return inbox.Replayed{Returned: 1}, l.last(ctx)
}

func (l slowLetters) Remove(ctx context.Context, _ inbox.Filter, _ inbox.Removal) (int, error) {
	return 1, l.last(ctx)
}

func (l slowLetters) last(ctx context.Context) error {
	l.started <- struct{}{}
	<-ctx.Done()
	time.Sleep(100 * time.Millisecond)
	return ctx.Err()
}

func TestPage_withoutLimits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Limiters = nil
	s := serve(t, r, page.Config{Authorize: everything})
	for _, address := range []string{"limits", "limits?key=grace"} {
		if body := s.get(t, address, 200, "has no rate limits"); strings.Contains(body, "<input") {
			t.Errorf("%s asks for a caller", address)
		}
	}
}
