package operator_test

import (
	"context"
	"html"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/outbox"
)

var after = regexp.MustCompile(`--after=(\S+)`)

// The lists of an outbox tell how they go on, and end. A consumer's have no order to go on in.
func TestListsGoOn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.goesOn(t, "outbox", "dead")
	for _, args := range [][]string{{}, {"--json"}} {
		if _, out, errs := r.run(t, append([]string{"inbox", "dead", "--limit=2"}, args...)...); !strings.HasPrefix(errs, "billing: the first 2 that were found") || strings.Contains(out+errs, "after=") {
			t.Errorf("inbox dead %v prints %q, %q", args, out, errs)
		}
	}
	r.wants(t, 2, []string{"inbox", "dead", "--after=1"})
	r.wants(t, 1, []string{"outbox", "dead", "--after=nonsense"})
	r.wants(t, 0, []string{"retry", "--all", "--from=outbox"})
	r.goesOn(t, "outbox", "pending")
	r.cfg.Outboxes = append(r.cfg.Outboxes, operator.Outbox{Name: "second", Store: newRig(t).cfg.Outboxes[0].Store})
	r.Operator = must(operator.New(r.cfg))(t)
	for _, list := range []string{"dead", "pending", "parked"} {
		r.wants(t, 2, []string{"outbox", list, "--after=1"})
	}
	if out := r.wants(t, 0, []string{"outbox", "dead", "--after=1", "--from=second"}, "no exchange b"); strings.Contains(out, "no exchange a") {
		t.Errorf("behind the first of the second outbox are %s", out)
	}
}

// goesOn goes through a list of a and b by pages of one.
func (r *rig) goesOn(t *testing.T, list ...string) {
	t.Helper()
	page := func(id string, args ...string) (more string) {
		t.Helper()
		code, out, errs := r.run(t, append(list, args...)...)
		if code != 0 || id != "" && !strings.Contains(out, id) || strings.Contains(out, "--after") {
			t.Errorf("%v %v exits with %d and prints %q", list, args, code, out)
		}
		if id == r.ids["b"].String() && strings.Contains(out, r.ids["a"].String()) {
			t.Errorf("%v: the second page is %s", list, out)
		}
		return after.FindString(errs)
	}
	first := page(r.ids["a"].String(), "--limit=1")
	if json := page(r.ids["a"].String(), "--limit=1", "--json"); first == "" || json != first {
		t.Errorf("%v goes on at %q, its JSON at %q", list, first, json)
	}
	if more := page(r.ids["b"].String(), first, "--from=outbox"); more != "" {
		t.Errorf("%v: the long second page goes on at %q", list, more)
	}
	second := page(r.ids["b"].String(), first, "--limit=1")
	if third := r.wants(t, 0, append(list, "--limit=1", second)); third != "" || second == "" {
		t.Errorf("%v: the third page, %q, is %s", list, second, third)
	}
	r.wants(t, 0, append(list, "--limit=1", "--json"), `"cursor": "`)
}

// timeless are dead letters whose last one has a time that is beyond all others and that no time.Time can tell.
type timeless struct{ operator.OutboxStore }

func (s timeless) DeadLetters() outbox.DeadLetters {
	return timelessLetters{s.OutboxStore.DeadLetters()}
}

type timelessLetters struct{ outbox.DeadLetters }

func (l timelessLetters) List(ctx context.Context, f outbox.Filter) ([]outbox.DeadLetter, error) {
	found, err := l.DeadLetters.List(ctx, f)
	found = slices.Clone(found)
	if len(found) == 2 {
		found[1].FailedAt = time.Time{}
	}
	return found, err
}

func newTimelessRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.cfg.Outboxes[0].Store = timeless{r.cfg.Outboxes[0].Store}
	r.Operator = must(operator.New(r.cfg))(t)
	return r
}

var next = regexp.MustCompile(`rel="next" href="([^"]*)"`)

// The page of an outbox leads to the next one, and back to the first.
func TestPageGoesOn(t *testing.T) {
	t.Parallel()
	s := newSite(t, operator.PageConfig{Authorize: everything})
	follow := func(body string) string {
		t.Helper()
		link := next.FindStringSubmatch(body)
		if link == nil {
			t.Fatalf("there is no next page: %s", body)
		}
		return html.UnescapeString(link[1])
	}
	first := s.get(t, "letters?from=outbox&limit=1", 200, "The oldest 1.", "no exchange a")
	second := s.get(t, follow(first), 200, "1 more.", "no exchange b", "The first ones")
	if strings.Contains(second, "no exchange a") || strings.Contains(second, `name="after"`) {
		t.Errorf("the second page, whose form is about all that match, is %s", second)
	}
	s.get(t, follow(second), 200, "There is none.", "The first ones")
	for _, address := range []string{"letters?limit=1", "letters?from=billing&limit=1"} {
		if body := s.get(t, address, 200, "The first 1 that were found."); next.MatchString(body) {
			t.Errorf("%s: %s", address, body)
		}
	}
	timeless := serve(t, newTimelessRig(t), operator.PageConfig{Authorize: everything})
	timeless.get(t, follow(timeless.get(t, "letters?from=outbox&limit=2", 200, "no exchange b")), 200, "There is none.")
	if body := s.get(t, "groups?from=outbox&after=1", 200, "no exchange a"); strings.Contains(body, "after=") {
		t.Errorf("from the kinds one comes into the middle of a list: %s", body)
	}
	s.get(t, "letters?from=billing&after=1", 200, "no order to go on in")
	s.get(t, "preview?what=retry&from=outbox&after=1", 200, `<span class="count">2</span>`)

	s.wants(t, 0, []string{"retry", "--all", "--from=outbox", "--rate=0.01"})
	s.get(t, follow(s.get(t, "waiting?limit=1", 200, "key a")), 200, "There is none.")
	s.get(t, follow(s.get(t, "waiting?parked=1&limit=1", 200, "key b")), 200, "There is none.", "Those that wait for their first")
}

func TestMCPGoesOn(t *testing.T) {
	t.Parallel()
	a := newAgent(t, operator.MCPConfig{Access: operator.Access{By: "ada", Change: true}})
	a.tells(t, "letters", map[string]any{"from": []string{"outbox"}, "after": "1"}, "no exchange b", "!no exchange a", `"cursor":"2"`)
	a.refuses(t, "letters", map[string]any{"after": "1"}, "from")
	a.tells(t, "waiting", map[string]any{"from": []string{"outbox"}, "after": "x"}, "no cursor")
	a.refuses(t, "drop", map[string]any{"all": true, "after": "1", "reason": "x"}, "after")
	a.tells(t, "letters", nil, "no exchange a", "no handler for c")
}
