package operator_test

import (
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/inbox"
)

// A body is replaced on the way back, by a file or by a patch; the log says so.
func TestEdit(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	file := filepath.Join(t.TempDir(), "body")
	check(t, os.WriteFile(file, []byte("mended"), 0o600))
	r.wants(t, 0, []string{"retry", "--from=outbox", "--body=" + file, "--dry-run", r.ids["b"].String()}, "outbox: 1 would be retried")
	r.wants(t, 0, []string{"retry", "--from=outbox", "--body=" + file, r.ids["b"].String()}, "outbox: 1 retried")
	r.wants(t, 0, []string{"retry", "--from=outbox", "--name=a", `--patch={"secret":null,"n":1}`, "--by=ada"}, "outbox: 1 retried")
	if a, b := r.published(t, "a"), r.published(t, "b"); a != `{"n":1}` || b != "mended" {
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

// Messages without an id are different ones, though they count as one: only one gets the body.
func TestEditWithoutID(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, body := range []string{"apples", "pears"} {
		check(t, r.broker.Send(t.Context(), &inbox.Message{Name: "e", ContentType: "text/plain", Body: []byte(body)}))
	}
	r.take(t)
	file := filepath.Join(t.TempDir(), "body")
	check(t, os.WriteFile(file, []byte("mended"), 0o600))
	code, out, errs := r.run(t, "retry", "--from=billing", "--body="+file, uuid.Nil.String())
	if code != 1 || out != "billing: 1 retried, 1 could not be\n" || !strings.Contains(errs, "the same id") {
		t.Errorf("exits with %d: %s%s", code, out, errs)
	}
	r.take(t)
	if left := r.wants(t, 0, []string{"show", uuid.Nil.String()}); strings.Contains(left, "apples") == strings.Contains(left, "pears") || strings.Count(left, "mended") != 1 {
		t.Errorf("the letters are %s", left)
	}
}

// A body is edited as a whole or by a patch, shown before it is sent, and kept from those who may not see it.
func TestPageEdits(t *testing.T) {
	t.Parallel()
	s := newSite(t, operator.PageConfig{Authorize: everything, Mask: func(m operator.MaskedMessage) []byte {
		if m.Name == "d" {
			return nil
		}
		return m.Body
	}})
	one := "outbox/" + s.ids["a"].String()
	s.get(t, "letter?from=outbox&body=1&id="+one, 200, "Retry it with another body", `name="edited"`)
	s.get(t, "letter?from=billing&body=1&id=billing/"+s.ids["d"].String(), 200, "hidden by the service")
	form := url.Values{"what": {"retry"}, "id": {one}, "edited": {"{\r\n  \"secret\": \"z\"\r\n}"}}
	s.post(t, "preview", form, 200, "1 would be sent again", `"secret": "z"`)
	s.job(t, form, "with other bodies")
	if body := s.published(t, "a"); body != `{"secret":"z"}` {
		t.Errorf("the body is %s", body)
	}
	s.get(t, "log", 200, "edit and retry")

	all := url.Values{"what": {"retry"}, "from": {"billing"}, "patch": {`{"secret":null,"mended":true}`}}
	s.post(t, "preview", all, 200, "2 would be sent again", ", 1 cannot be", "the service hides a part of the body", `"mended": true`)
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

// A mask that panics hides the body, also in a change, where nobody else would catch it.
func TestMaskPanics(t *testing.T) {
	t.Parallel()
	mask := func(operator.MaskedMessage) []byte { panic("no such field") }
	s := newSite(t, operator.PageConfig{Authorize: everything, Mask: mask})
	s.get(t, "letter?from=outbox&body=1&id=outbox/"+s.ids["a"].String(), 200, "hidden by the service")
	s.job(t, url.Values{"what": {"retry"}, "from": {"billing"}, "patch": {`{"a":1}`}})
	s.get(t, "letters?from=billing", 200, "3 in all")
	a := newAgent(t, operator.MCPConfig{Access: operator.Access{Bodies: true}, Mask: mask})
	a.tells(t, "explain", map[string]any{"id": a.ids["a"], "body": true}, "hidden by the service", "!secret")
}

// Who may change something, and see no bodies, edits none.
func TestPageEditsNothingUnseen(t *testing.T) {
	t.Parallel()
	s := newSite(t, operator.PageConfig{Authorize: func(*http.Request) (operator.Access, error) { return operator.Access{By: "ada", Change: true}, nil }})
	if body := s.get(t, "preview?what=retry", 200); strings.Contains(body, "patch") {
		t.Errorf("a patch is asked for: %s", body)
	}
	s.post(t, "apply", url.Values{"what": {"retry"}, "patch": {`{"a":1}`}}, 400, "may not see bodies")
}
