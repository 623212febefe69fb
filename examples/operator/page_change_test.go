package operator_test

import (
	"context"
	"errors"
	"fmt"
	"html"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

var hidden = regexp.MustCompile(`<input type="hidden" name="([^"]*)" value="([^"]*)">`)

// applied previews a change, begins it as the preview's form does, and waits for its end.
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

// job begins a change and waits until it has ended.
func (s *site) job(t *testing.T, form url.Values, parts ...string) {
	t.Helper()
	body := s.post(t, "apply", form, 200, append(parts, "begun by ada")...)
	id := regexp.MustCompile(`progress\?id=(\d+)`).FindStringSubmatch(body)
	testenv.Eventually(t, func() error {
		if id != nil && !strings.Contains(body, "Ended") {
			body = s.get(t, "job?id="+id[1], 200)
			return fmt.Errorf("the change does not end: %s", body)
		}
		return nil
	})
}

func TestPageChanges(t *testing.T) {
	t.Parallel()
	s := newSite(t, operator.PageConfig{Authorize: everything})
	group := regexp.MustCompile(`preview\?([^"]*group=[^"]*what=retry)`).FindStringSubmatch(s.get(t, "groups?name=c", 200))
	if group == nil {
		t.Fatal("a group cannot be retried")
	}
	s.applied(t, "preview?"+html.UnescapeString(group[1]), url.Values{"reason": {"handler deployed"}}, "2 would be sent again", "billing: 2")
	s.get(t, "groups?name=c", 200, "There is none.")
	s.applied(t, "preview?what=drop&chosen=1&id=outbox/"+s.ids["a"].String()+"&id=billing/"+s.ids["d"].String(), nil, "2 would be deleted for ever")
	s.get(t, "letters", 200, "no exchange b", "1 in all")
	for _, asked := range []string{"", "&until=0s", "&until=2999-01-01T00:00:00Z", "&since=1h&until=10ms"} {
		found := regexp.MustCompile(`name="(?:since|until)" value="([^"]*)"`).FindAllStringSubmatch(s.get(t, "preview?what=retry"+asked, 200), -1)
		if len(found) != 1+strings.Count(asked, "since") {
			t.Errorf("with %q the form has %q", asked, found)
		}
		for _, field := range found {
			if at := must(time.Parse(time.RFC3339, field[1]))(t); at.After(time.Now()) {
				t.Errorf("with %q what fails until %v, which is to come, would be retried unseen", asked, at)
			}
		}
	}
	s.applied(t, "preview?what=retry&matching=1", url.Values{"rate": {"50"}}, "1 would be sent again")
	s.get(t, "letters", 200, "There is none.")
	s.get(t, "waiting?from=outbox", 200, "key b")
	s.get(t, "log", 200, "handler deployed", "retry", "drop", "ada", "Begun on this page")
}

// The letters that are marked may be too many for an address, and count only where they are meant.
func TestPageMarks(t *testing.T) {
	t.Parallel()
	s := newSite(t, operator.PageConfig{Authorize: everything})
	s.get(t, "letters", 200, `<form method="post" action="preview">`)
	marked := url.Values{"what": {"retry"}, "id": {"outbox/" + s.ids["a"].String(), "outbox/" + s.ids["b"].String()}}
	marked.Set("chosen", "1")
	s.post(t, "preview", marked, 200, "2 would be sent again")
	marked.Del("chosen")
	marked.Set("matching", "1")
	s.post(t, "preview", marked, 200, "5 would be sent again")
}

// A change that is stopped ends, and says who stopped it; only those may do so who may change something.
func TestPageStops(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	slow := slowConsumer{r.cfg.Consumers[0].Consumer, make(chan struct{}, 1)}
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: slow}}
	r.Operator = must(operator.New(r.cfg))(t)
	s := serve(t, r, operator.PageConfig{Authorize: func(r *http.Request) (operator.Access, error) {
		return operator.Access{By: r.FormValue("as"), Change: r.FormValue("as") != ""}, nil
	}})
	s.post(t, "apply", url.Values{"what": {"drop"}, "from": {"billing"}, "as": {"ada"}}, 200, "begun by ada")
	<-slow.begun
	if body := s.get(t, "job?id=1", 200); strings.Contains(body, "Stop") {
		t.Error("who may only look is offered to stop it")
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

// A page that is closed has stopped what it has begun, and the log tells how far that came.
func TestPageCloseWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	slow := slowConsumer{r.cfg.Consumers[0].Consumer, make(chan struct{}, 2)}
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: slow}}
	r.Operator = must(operator.New(r.cfg))(t)
	s := serve(t, r, operator.PageConfig{Authorize: everything})
	s.post(t, "apply", url.Values{"what": {"retry"}, "from": {"billing"}}, 200, "begun by ada", "billing: 0 so far")
	s.post(t, "apply", url.Values{"what": {"drop"}, "from": {"billing"}}, 200, "begun by ada", "billing: 0 so far")
	<-slow.begun
	<-slow.begun
	s.page.Close()
	for _, a := range must(r.cfg.Log.List(t.Context(), operator.LogFilter{Limit: 2}))(t) {
		if a.Count == nil || *a.Count != 1 || a.Failure == "" {
			t.Errorf("%+v", a)
		}
	}
	s.post(t, "apply", url.Values{"what": {"retry"}}, 503, "the process ends")
}

// slowConsumer has letters whose changes last until they are cancelled, and a little longer.
type slowConsumer struct {
	operator.DeadLetterer
	begun chan struct{}
}

func (c slowConsumer) DeadLetters() inbox.DeadLetters {
	return slowLetters{c.DeadLetterer.DeadLetters(), c.begun}
}

type slowLetters struct {
	inbox.DeadLetters
	begun chan struct{}
}

func (l slowLetters) Replay(ctx context.Context, _ inbox.Filter, _ inbox.Replay) (inbox.Replayed, error) {
	return inbox.Replayed{Returned: 1}, l.last(ctx)
}

func (l slowLetters) Remove(ctx context.Context, _ inbox.Filter, _ inbox.Removal) (int, error) {
	return 1, l.last(ctx)
}

func (l slowLetters) last(ctx context.Context) error {
	l.begun <- struct{}{}
	<-ctx.Done()
	time.Sleep(100 * time.Millisecond)
	return ctx.Err()
}
