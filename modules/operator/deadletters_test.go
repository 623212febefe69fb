package operator_test

import (
	"context"
	"errors"
	"fmt"
	"html"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/agents"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/outbox"
)

// partly has dead letters of which another session holds some.
type partly struct{ inbox.DeadLetters }

func (p partly) List(ctx context.Context, f inbox.Filter) ([]inbox.DeadLetter, error) {
	found, _ := p.DeadLetters.List(ctx, f)
	return found, inbox.ErrHeld
}

func (p partly) Count(ctx context.Context, f inbox.Filter) (int, error) {
	n, _ := p.DeadLetters.Count(ctx, f)
	return n, inbox.ErrHeld
}

func (p partly) Groups(ctx context.Context, f inbox.Filter) ([]inbox.Group, error) {
	found, _ := p.DeadLetters.Groups(ctx, f)
	return found, inbox.ErrHeld
}

func (p partly) Replay(ctx context.Context, f inbox.Filter, how inbox.Replay) (inbox.Replayed, error) {
	done, err := p.DeadLetters.Replay(ctx, f, how)
	return done, errors.Join(err, inbox.ErrHeld)
}

func (p partly) Remove(ctx context.Context, f inbox.Filter, r inbox.Removal) (int, error) {
	n, _ := p.DeadLetters.Remove(ctx, f, r)
	return n, inbox.ErrHeld
}

// partlyConsumer has the dead letters of partly.
type partlyConsumer struct{ letters partly }

func (c partlyConsumer) DeadLetters() inbox.DeadLetters { return c.letters }

func (c partlyConsumer) Stats(context.Context) (inbox.Stats, error) {
	return inbox.Stats{Dead: map[string]int{"default": 0}, Held: true}, nil
}

// newPartlyRig returns a rig that sees only a part of its consumer's dead letters.
func newPartlyRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: partlyConsumer{partly{r.cfg.Consumers[0].Consumer.DeadLetters()}}}}
	return r
}

// A part of the dead letters is shown as a part, and no command reports it as all.
func TestDeadLetters_heldByAnotherSession(t *testing.T) {
	t.Parallel()
	for command, shown := range map[string]string{
		"inbox dead":                          "no handler for d",
		"inbox dead --json":                   `"part": true`,
		"groups --from=billing":               " 2+ ",
		"groups --from=billing --json":        `"part": true`,
		"drop --from=billing --all --dry-run": "3 would be dropped",
		"drop --from=billing --limit=1":       "1 dropped",
		"retry --from=billing --all":          "3 retried",
	} {
		r := newPartlyRig(t)
		code, out, errs := r.run(t, strings.Fields(command)...)
		if code != 1 || !strings.Contains(out, shown) {
			t.Errorf("%s exits with %d and prints %q", command, code, out)
		}
		if !strings.Contains(errs, "a part") || !strings.Contains(errs, "another session holds the rest") {
			t.Errorf("%s says %q", command, errs)
		}
	}
	newPartlyRig(t).wants(t, 1, []string{"status"}, "–            0+ ")
	newPartlyRig(t).wants(t, 1, []string{"status", "--json"}, `"part": true`)
	if out := newRig(t).wants(t, 1, []string{"status", "--json"}); strings.Contains(out, `"part": true`) {
		t.Errorf("the complete status is marked as a part: %s", out)
	}
	if out := newPartlyRig(t).wants(t, 0, []string{"outbox", "dead", "--json"}); strings.Contains(out, `"part"`) {
		t.Errorf("an outbox has no parts: %s", out)
	}
	page := serve(t, newPartlyRig(t), page.Config{Authorize: everything, Mask: func(operator.MaskedMessage) []byte { return nil }})
	page.get(t, "", 200, "+: another session holds more dead letters.")
	page.get(t, "groups?from=billing", 200, "another session holds the rest", "2+")
	page.get(t, "dead-letters?from=billing", 200, "3 visible, a part only.")
	page.get(t, "dead-letters?from=billing&key=none", 200, "None could be seen.")
	page.get(t, "preview?what=retry&from=billing&patch=%7B%22a%22:1%7D", 200, "3 would fail", "another session holds the rest")
}

// far is a time in milliseconds that was read as seconds.
var far = time.Unix(1_800_000_000_000, 0)

// farConsumer has dead letters of another program, with times that JSON cannot express.
type farConsumer struct{ operator.DeadLetterer }

func (c farConsumer) DeadLetters() inbox.DeadLetters { return farLetters{c.DeadLetterer.DeadLetters()} }

type farLetters struct{ inbox.DeadLetters }

func (l farLetters) List(ctx context.Context, f inbox.Filter) ([]inbox.DeadLetter, error) {
	found, err := l.DeadLetters.List(ctx, f)
	found = slices.Clone(found)
	for i := range found {
		l := &found[i]
		l.Message.PublishedAt, l.Message.History, l.FailedAt, l.FirstFailedAt = far, []inbox.FailedAttempt{{At: far}}, far, far
	}
	return found, err
}

// One dead letter with an odd time does not hide the others from --json and from agents.
func TestDeadLetters_timesBeyondJSON(t *testing.T) {
	t.Parallel()
	a := newAgent(t, agents.Config{}, func(cfg *operator.Config) { cfg.Consumers[0].Consumer = farConsumer{cfg.Consumers[0].Consumer} })
	a.wants(t, 0, []string{"inbox", "dead", "--json"}, a.ids["d"].String())
	a.answers(t, "dead_letters", nil, a.ids["d"].String())
	a.answers(t, "explain", map[string]any{"id": a.ids["d"]}, "no handler for d")
}

// alone has dead letters that fail the test if two goroutines read them at the same time.
type alone struct {
	inbox.DeadLetters
	t     *testing.T
	taken *sync.Mutex
}

// aloneConsumer has the dead letters of alone.
type aloneConsumer struct{ alone alone }

func (c aloneConsumer) DeadLetters() inbox.DeadLetters { return c.alone }

func (a alone) look() {
	a.t.Helper()
	if !a.taken.TryLock() {
		a.t.Error("two readers at the same time")
		return
	}
	defer a.taken.Unlock()
	time.Sleep(time.Millisecond)
}

func (a alone) List(ctx context.Context, f inbox.Filter) ([]inbox.DeadLetter, error) {
	a.look()
	return a.DeadLetters.List(ctx, f)
}

func (a alone) Groups(ctx context.Context, f inbox.Filter) ([]inbox.Group, error) {
	a.look()
	return a.DeadLetters.Groups(ctx, f)
}

func (a alone) Replay(ctx context.Context, f inbox.Filter, how inbox.Replay) (inbox.Replayed, error) {
	a.look()
	return a.DeadLetters.Replay(ctx, f, how)
}

// Viewers of a consumer's dead letters take turns, so that each sees all of them.
func TestPageViewersTakeTurns(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: aloneConsumer{alone{r.cfg.Consumers[0].Consumer.DeadLetters(), t, &sync.Mutex{}}}}}
	s := serve(t, r, page.Config{Authorize: everything})
	var viewers sync.WaitGroup
	for range 10 {
		for view, part := range map[string]string{"groups": "no handler for c", "dead-letters?from=billing": "3 in all", "preview?what=retry&from=billing": "3 would be sent again"} {
			viewers.Go(func() { s.get(t, view, 200, part) })
		}
	}
	viewers.Wait()
}

// A file or a patch replaces a body on retry, and the log records it.
func TestEdit(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	file := filepath.Join(t.TempDir(), "body")
	check(t, os.WriteFile(file, []byte("fixed"), 0o600))
	r.wants(t, 0, []string{"retry", "--from=outbox", "--body=" + file, "--dry-run", r.ids["b"].String()}, "outbox: 1 would be retried")
	r.wants(t, 0, []string{"retry", "--from=outbox", "--body=" + file, r.ids["b"].String()}, "outbox: 1 retried")
	r.wants(t, 0, []string{"retry", "--from=outbox", "--name=a", `--patch={"secret":null,"n":1}`, "--by=ada"}, "outbox: 1 retried")
	if a, b := r.published(t, "a"), r.published(t, "b"); a != `{"n":1}` || b != "fixed" {
		t.Errorf("published %s and %s", a, b)
	}
	r.wants(t, 0, []string{"log"}, "edit and retry", "ada")
	for _, args := range [][]string{
		{"--all", "--body=" + file},
		{"--all", "--patch=[]"},
		{"--all", "--patch={"},
		{r.ids["d"].String(), "--body=/nowhere"},
		{r.ids["d"].String(), "--body=" + file, `--patch={"a":1}`},
	} {
		r.wants(t, 2, append([]string{"retry"}, args...))
	}
}

// Messages without an id are different messages with the same id: only one of them gets the body.
func TestEditWithoutID(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, body := range []string{"apples", "pears"} {
		check(t, r.broker.Send(t.Context(), &inbox.Message{Name: "e", ContentType: "text/plain", Body: []byte(body)}))
	}
	r.take(t)
	file := filepath.Join(t.TempDir(), "body")
	check(t, os.WriteFile(file, []byte("fixed"), 0o600))
	code, out, errs := r.run(t, "retry", "--from=billing", "--body="+file, uuid.Nil.String())
	if code != 1 || out != "billing: 1 retried, 1 failed\n" || !strings.Contains(errs, "the same id") {
		t.Errorf("exits with %d: %s%s", code, out, errs)
	}
	r.take(t)
	if left := r.wants(t, 0, []string{"show", uuid.Nil.String()}); strings.Contains(left, "apples") == strings.Contains(left, "pears") || strings.Count(left, "fixed") != 1 {
		t.Errorf("the dead letters are %s", left)
	}
}

// A body is edited as a whole or by a patch. The page shows it before it is sent, and hides it from those who may not see it.
func TestPageEdits(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: everything, Mask: func(m operator.MaskedMessage) []byte {
		if m.Name == "d" {
			return nil
		}
		return m.Body
	}})
	one := "outbox/" + s.ids["a"].String()
	s.get(t, "dead-letter?from=outbox&body=1&id="+one, 200, "Edit body", `name="edited"`)
	s.get(t, "dead-letter?from=billing&body=1&id=billing/"+s.ids["d"].String(), 200, "hidden by the service")
	form := url.Values{"what": {"retry"}, "id": {one}, "edited": {"{\r\n  \"secret\": \"z\"\r\n}"}}
	s.post(t, "preview", form, 200, "1 would be sent again", `"secret": "z"`)
	s.job(t, form, "with edited bodies")
	if body := s.published(t, "a"); body != `{"secret":"z"}` {
		t.Errorf("the body is %s", body)
	}
	s.get(t, "log", 200, "edit and retry")

	all := url.Values{"what": {"retry"}, "from": {"billing"}, "patch": {`{"secret":null,"fixed":true}`}}
	s.post(t, "preview", all, 200, "2 would be sent again", ", 1 would fail", "the service hides a part of the body", `"fixed": true`)
	for _, wrong := range []url.Values{
		{"what": {"drop"}, "patch": {`{"a":1}`}},
		{"what": {"retry"}, "patch": {`[1]`}},
		{"what": {"retry"}, "patch": {`{`}},
		{"what": {"retry"}, "from": {"billing"}, "edited": {"1"}},
		{"what": {"retry"}, "id": {one}, "edited": {"1"}, "patch": {`{"a":1}`}},
		{"what": {"retry"}, "id": {one}, "edited": {strings.Repeat("x", 1<<20+1)}},
	} {
		s.post(t, "preview", wrong, 400)
		s.post(t, "apply", wrong, 400)
	}
}

// A mask that panics hides the body, also during a change, where nothing else recovers.
func TestMaskPanics(t *testing.T) {
	t.Parallel()
	mask := func(operator.MaskedMessage) []byte { panic("no such field") }
	s := newSite(t, page.Config{Authorize: everything, Mask: mask})
	s.get(t, "dead-letter?from=outbox&body=1&id=outbox/"+s.ids["a"].String(), 200, "hidden by the service")
	s.job(t, url.Values{"what": {"retry"}, "from": {"billing"}, "patch": {`{"a":1}`}})
	s.get(t, "dead-letters?from=billing", 200, "3 in all")
	a := newAgent(t, agents.Config{Access: operator.Access{Bodies: true}, Mask: mask})
	a.answers(t, "explain", map[string]any{"id": a.ids["a"], "body": true}, "hidden by the service", "!secret")
}

// A user who may change messages but not see bodies edits none.
func TestPageEditsNothingUnseen(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: func(*http.Request) (operator.Access, error) { return operator.Access{By: "ada", Change: true}, nil }})
	if body := s.get(t, "preview?what=retry", 200); strings.Contains(body, "patch") {
		t.Errorf("the page offers a patch: %s", body)
	}
	s.post(t, "apply", url.Values{"what": {"retry"}, "patch": {`{"a":1}`}}, 400, "may not see bodies")
}

var after = regexp.MustCompile(`--after=(\S+)`)

// The lists of an outbox print how to continue, and end. A consumer's dead letters have no order to continue in.
func TestListsGoOn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.goesOn(t, "outbox", "dead")
	for _, args := range [][]string{{}, {"--json"}} {
		if _, out, errs := r.run(t, append([]string{"inbox", "dead", "--limit=2"}, args...)...); !strings.HasPrefix(errs, "billing: showing the first 2 found") || strings.Contains(out+errs, "after=") {
			t.Errorf("inbox dead %v prints %q, %q", args, out, errs)
		}
	}
	r.wants(t, 2, []string{"inbox", "dead", "--after=1"})
	r.wants(t, 1, []string{"outbox", "dead", "--after=nonsense"})
	r.wants(t, 0, []string{"retry", "--all", "--from=outbox"})
	r.goesOn(t, "outbox", "pending")
	r.cfg.Outboxes = append(r.cfg.Outboxes, operator.Outbox{Name: "second", Store: newRig(t).cfg.Outboxes[0].Store})
	for _, list := range []string{"dead", "pending", "parked"} {
		r.wants(t, 2, []string{"outbox", list, "--after=1"})
	}
	if out := r.wants(t, 0, []string{"outbox", "dead", "--after=1", "--from=second"}, "no exchange b"); strings.Contains(out, "no exchange a") {
		t.Errorf("after the first of the second outbox come %s", out)
	}
}

// goesOn reads a list of a and b by pages of one.
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

// timeless has two dead letters. The last one has a time beyond the range of time.Time, which is read as zero.
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
	return r
}

var next = regexp.MustCompile(`rel="next" href="([^"]*)"`)

// A page of an outbox links to the next page, and to the first.
func TestPageGoesOn(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: everything})
	follow := func(body string) string {
		t.Helper()
		link := next.FindStringSubmatch(body)
		if link == nil {
			t.Fatalf("there is no next page: %s", body)
		}
		return html.UnescapeString(link[1])
	}
	first := s.get(t, "dead-letters?from=outbox&limit=1", 200, "The oldest 1.", "no exchange a")
	second := s.get(t, follow(first), 200, "1 more.", "no exchange b", "First page")
	if strings.Contains(second, "no exchange a") || strings.Contains(second, `name="after"`) {
		t.Errorf("the second page, whose form is about all that match, is %s", second)
	}
	s.get(t, follow(second), 200, `class="empty"`, "First page")
	for _, address := range []string{"dead-letters?limit=1", "dead-letters?from=billing&limit=1"} {
		if body := s.get(t, address, 200, "The first 1 found."); next.MatchString(body) {
			t.Errorf("%s: %s", address, body)
		}
	}
	timeless := serve(t, newTimelessRig(t), page.Config{Authorize: everything})
	timeless.get(t, follow(timeless.get(t, "dead-letters?from=outbox&limit=2", 200, "no exchange b")), 200, `class="empty"`)
	if body := s.get(t, "groups?from=outbox&after=1", 200, "no exchange a"); strings.Contains(body, "after=") {
		t.Errorf("the groups link into the middle of a list: %s", body)
	}
	s.get(t, "dead-letters?from=billing&after=1", 200, "is only for a List of an outbox")
	s.get(t, "preview?what=retry&from=outbox&after=1", 200, `<span class="count">2</span>`)

	s.wants(t, 0, []string{"retry", "--all", "--from=outbox", "--rate=0.01"})
	s.get(t, follow(s.get(t, "waiting?limit=1", 200, "key a")), 200, `class="empty"`)
	s.get(t, follow(s.get(t, "retrying?from=outbox&limit=1", 200, "key b")), 200, `class="empty"`)
}

func TestMCPGoesOn(t *testing.T) {
	t.Parallel()
	a := newAgent(t, agents.Config{Access: operator.Access{By: "ada", Change: true}})
	a.answers(t, "dead_letters", map[string]any{"from": []string{"outbox"}, "after": "1"}, "no exchange b", "!no exchange a", `"cursor":"2"`)
	a.refuses(t, "dead_letters", map[string]any{"after": "1"}, "from")
	a.answers(t, "waiting", map[string]any{"from": []string{"outbox"}, "after": "x"}, "not a list cursor")
	a.refuses(t, "drop", map[string]any{"all": true, "after": "1", "reason": "x"}, "after")
	a.answers(t, "dead_letters", nil, "no exchange a", "no handler for c")
}

// A paused outbox publishes nothing until it is resumed. The status and the log show who paused it, and why.
func TestPause(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 0, []string{"pause", "outbox", "--by=ada", "--dry-run"}, "outbox would be paused")
	r.wants(t, 0, []string{"pause", "outbox", "billing", "--by=ada", "--reason=the broker moves"}, "outbox is paused", "billing is paused")
	r.wants(t, 0, []string{"retry", "--from=outbox", "--name=a", "--by=ada"}, "1 retried")
	if body := r.published(t, "a"); body != "" {
		t.Errorf("published in a pause: %s", body)
	}
	r.wants(t, 1, []string{"status"}, "billing is paused by ada since 2", "outbox is paused by ada since 2", ": the broker moves")
	r.wants(t, 1, []string{"status", "--json"}, `"reason": "the broker moves"`)
	r.wants(t, 0, []string{"resume", "outbox", "billing", "--by=bob", "--json"}, `"part": "billing"`, `"paused": false`)
	if body := r.published(t, "a"); body == "" {
		t.Error("nothing is published after the pause")
	}
	if status := r.wants(t, 1, []string{"status"}); strings.Contains(status, "paused") {
		t.Errorf("it is paused: %s", status)
	}
	if log := r.wants(t, 0, []string{"log"}, "pause", "resume", "ada", "bob", "the broker moves"); strings.Count(log, "\n") != 6 {
		t.Errorf("the log has %s", log)
	}
	for _, args := range [][]string{{"pause"}, {"pause", "holds"}, {"resume", "x"}, {"pause", "outbox", "--by="}, {"pause", "outbox", "--reason=a\nb"}} {
		r.wants(t, 2, args)
	}
}

func TestPagePauses(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: everything})
	s.get(t, "", 200, "Pause and resume")
	s.post(t, "pause", url.Values{"what": {"pause"}, "part": {"billing"}, "reason": {"the bank is down"}}, 200, "Paused by ada", "the bank is down")
	body := s.post(t, "pause", url.Values{"what": {"resume"}, "part": {"billing"}}, 200)
	if strings.Contains(body, "the bank is down") {
		t.Errorf("it is still paused: %s", body)
	}
	s.get(t, "log", 200, "pause", "resume", "the bank is down")
	for _, wrong := range []url.Values{{"what": {"pause"}, "part": {"holds"}}, {"what": {"stop"}, "part": {"outbox"}}, {"what": {"pause"}, "part": {"outbox"}, "reason": {"a\nb"}}} {
		s.post(t, "pause", wrong, 400)
	}
}

// exclusive is a consumer whose dead letters only one session can see, as on RabbitMQ.
type exclusive struct {
	gone
	noLetters
	sessions, removed, part atomic.Int32
}

func (e *exclusive) DeadLetters() inbox.DeadLetters { return e }

func (e *exclusive) Exclusive() bool { return true }

// List reads until ctx ends.
func (e *exclusive) List(ctx context.Context, _ inbox.Filter) ([]inbox.DeadLetter, error) {
	e.sessions.Add(1)
	defer e.sessions.Add(-1)
	<-ctx.Done()
	return nil, ctx.Err()
}

// Remove notes whether another session held some of the dead letters.
func (e *exclusive) Remove(context.Context, inbox.Filter, inbox.Removal) (int, error) {
	for range 20 {
		if e.sessions.Load() > 0 {
			e.part.Add(1)
		}
		time.Sleep(10 * time.Millisecond) // timing: readers would come meanwhile
	}
	e.removed.Add(1)
	return 7, nil
}

// Browsers that reload views of a large queue neither delay a change of it nor hide dead letters from the change.
func TestPageChanges_whileOthersRead(t *testing.T) {
	t.Parallel()
	var queue exclusive
	s := serve(t, &rig{cfg: operator.Config{Consumers: []operator.Consumer{{Name: "large", Consumer: &queue}}}}, page.Config{Authorize: everything})
	ctx, leave := context.WithCancel(t.Context())
	var tabs sync.WaitGroup
	for n := range 5 {
		tabs.Go(func() {
			for ctx.Err() == nil {
				r := must(http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprint(s.url, "dead-letters?name=", n), nil))(t)
				if answer, err := http.DefaultClient.Do(r); err == nil {
					_ = answer.Body.Close()
				}
			}
		})
	}
	testenv.Eventually(t, func() error {
		if queue.sessions.Load() == 0 {
			return errors.New("nobody reads")
		}
		return nil
	})
	s.job(t, url.Values{"what": {"drop"}, "from": {"large"}})
	leave()
	tabs.Wait()
	if queue.removed.Load() != 1 || queue.part.Load() > 0 {
		t.Errorf("%d changes, and readers beside them %d times", queue.removed.Load(), queue.part.Load())
	}
}
