package operator_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/inbox"
)

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
