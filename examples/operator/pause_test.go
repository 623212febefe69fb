package operator_test

import (
	"net/url"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/examples/operator"
)

// A paused outbox publishes nothing until it is resumed, and the status and the log say who did it and why.
func TestPause(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 0, []string{"pause", "outbox", "--by=ada", "--dry-run"}, "outbox would be paused")
	r.wants(t, 0, []string{"pause", "outbox", "billing", "--by=ada", "--reason=the broker moves"}, "outbox is paused", "billing is paused")
	r.wants(t, 0, []string{"retry", "--from=outbox", "--name=a", "--by=ada"}, "1 retried")
	if body := r.published(t, "a"); body != "" {
		t.Errorf("published in a pause: %s", body)
	}
	r.wants(t, 0, []string{"status"}, "billing is paused by ada since 2", "outbox is paused by ada since 2", ": the broker moves")
	r.wants(t, 0, []string{"status", "--json"}, `"reason": "the broker moves"`)
	r.wants(t, 0, []string{"resume", "outbox", "billing", "--by=bob", "--json"}, `"part": "billing"`, `"paused": false`)
	if body := r.published(t, "a"); body == "" {
		t.Error("nothing is published after the pause")
	}
	if status := r.wants(t, 0, []string{"status"}); strings.Contains(status, "paused") {
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
	s := newSite(t, operator.PageConfig{Authorize: everything})
	s.get(t, "", 200, "Pause and resume")
	s.post(t, "pause", url.Values{"what": {"pause"}, "part": {"billing"}, "reason": {"the bank is down"}}, 200, "paused by ada since", "the bank is down")
	body := s.post(t, "pause", url.Values{"what": {"resume"}, "part": {"billing"}}, 200)
	if strings.Contains(body, "the bank is down") {
		t.Errorf("it is still paused: %s", body)
	}
	s.get(t, "log", 200, "pause", "resume", "the bank is down")
	for _, wrong := range []url.Values{{"what": {"pause"}, "part": {"holds"}}, {"what": {"stop"}, "part": {"outbox"}}, {"what": {"pause"}, "part": {"outbox"}, "reason": {"a\nb"}}} {
		s.post(t, "pause", wrong, 400)
	}
}
