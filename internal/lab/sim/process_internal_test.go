package sim

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestEnds: a process ends when it is told to, or is killed, and not by itself.
func TestEnds(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		end  func(p *process) error // what Run returns
		want string                 // empty: nothing is found
	}{
		"told":      {func(p *process) error { p.tell(); return nil }, ""},
		"killed":    {func(p *process) error { p.kill(); return nil }, ""},
		"by itself": {func(*process) error { return nil }, "x-0#1 ended by itself"},
		"failed":    {func(*process) error { return errors.New("no") }, "x-0#1 ended: no"},
		"told, and slow": {func(p *process) error {
			p.tell()
			time.Sleep(longestEnd + time.Second)
			return nil
		}, "x-0#1 ended 46s after it was told to"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := &world{ctx: t.Context(), began: time.Now()}
				time.Sleep(time.Second)
				p := w.newProcess("x", 0, 1)
				defer p.bury()
				w.look(p, tc.end(p))
				found := strings.Join(w.findings, "\n")
				if tc.want == "" && found != "" || !strings.Contains(found, tc.want) {
					t.Errorf("found %q, want %q", found, tc.want)
				}
			})
		})
	}
}
