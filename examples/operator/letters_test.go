package operator_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/inbox"
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

// partlyConsumer has them.
type partlyConsumer struct{ letters partly }

func (c partlyConsumer) DeadLetters() inbox.DeadLetters { return c.letters }

func (c partlyConsumer) Stats(context.Context) (inbox.Stats, error) {
	return inbox.Stats{Dead: map[string]int{"default": 0}, Held: true}, nil
}

// newPartlyRig is a rig that sees a part of its consumer's dead letters.
func newPartlyRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: partlyConsumer{partly{r.cfg.Consumers[0].Consumer.DeadLetters()}}}}
	r.Operator = must(operator.New(r.cfg))(t)
	return r
}

// A part of the dead letters is shown as a part, and no command passes it off as all.
func TestPartOfTheLetters(t *testing.T) {
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
	newPartlyRig(t).wants(t, 0, []string{"status"}, "-            0+ ")
	newPartlyRig(t).wants(t, 0, []string{"status", "--json"}, `"part": true`)
	if out := newRig(t).wants(t, 0, []string{"status", "--json"}); strings.Contains(out, `"part"`) {
		t.Errorf("the status of all is that of a part: %s", out)
	}
	if out := newPartlyRig(t).wants(t, 0, []string{"outbox", "dead", "--json"}); strings.Contains(out, `"part"`) {
		t.Errorf("an outbox has no parts: %s", out)
	}
}

// The page shows it, too.
func TestPageShowsPartOfTheLetters(t *testing.T) {
	t.Parallel()
	const said = "a part only: another session holds the rest"
	s := serve(t, newPartlyRig(t), operator.PageConfig{Authorize: everything})
	if body := s.get(t, "", 200, "and those that another session holds"); strings.Contains(body, "none") {
		t.Errorf("the status has none: %s", body)
	}
	s.get(t, "groups?from=billing", 200, said, "2+")
	s.get(t, "groups?from=billing&key=none", 200, "None could be seen.")
	s.get(t, "letters?from=billing", 200, said, "3 that could be seen, a part only.")
	s.get(t, "letters?from=billing&key=none", 200, "None could be seen.")
	s.get(t, "preview?what=retry&from=billing", 200, said)
	s.get(t, "preview?what=drop&from=billing", 200, said)
	masked := serve(t, newPartlyRig(t), operator.PageConfig{Authorize: everything, Mask: func(operator.MaskedMessage) []byte { return nil }})
	masked.get(t, "preview?what=retry&from=billing&patch=%7B%22a%22:1%7D", 200, "3 cannot be", "hides a part", "another session holds the rest")
}

// far is a time in milliseconds that was read as seconds.
var far = time.Unix(1_800_000_000_000, 0)

// farConsumer has letters of another program, whose times no JSON can tell.
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

// One letter with an odd time does not hide the others from --json and from agents.
func TestTimesThatJSONCannotTell(t *testing.T) {
	t.Parallel()
	a := newAgent(t, operator.MCPConfig{}, func(cfg *operator.Config) { cfg.Consumers[0].Consumer = farConsumer{cfg.Consumers[0].Consumer} })
	a.wants(t, 0, []string{"inbox", "dead", "--json"}, a.ids["d"].String())
	a.tells(t, "letters", nil, a.ids["d"].String())
	a.tells(t, "explain", map[string]any{"id": a.ids["d"]}, "no handler for d")
}

// alone has dead letters that fail the test where two look at the same time.
type alone struct {
	inbox.DeadLetters
	t     *testing.T
	taken *sync.Mutex
}

// aloneConsumer has them.
type aloneConsumer struct{ alone alone }

func (c aloneConsumer) DeadLetters() inbox.DeadLetters { return c.alone }

func (a alone) look() {
	a.t.Helper()
	if !a.taken.TryLock() {
		a.t.Error("two look at the same time")
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

// Of many who look at a consumer's dead letters each sees all of them, as they take turns.
func TestPageViewersTakeTurns(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: aloneConsumer{alone{r.cfg.Consumers[0].Consumer.DeadLetters(), t, &sync.Mutex{}}}}}
	r.Operator = must(operator.New(r.cfg))(t)
	s := serve(t, r, operator.PageConfig{Authorize: everything})
	var viewers sync.WaitGroup
	for range 10 {
		for view, part := range map[string]string{"groups": "no handler for c", "letters?from=billing": "3 in all", "preview?what=retry&from=billing": "3 would be sent again"} {
			viewers.Go(func() { s.get(t, view, 200, part) })
		}
	}
	viewers.Wait()
}
