package outbox

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/outbox/driver"
)

// failure is a failed attempt to publish.
type failure struct {
	class   driver.Class
	err     error
	attempt int           // its number, from 1
	dead    bool          // it was the last one: the message becomes a dead letter
	delay   time.Duration // until the next one, if not dead
}

func (rs *rounds) failure(m driver.Message, err error) failure {
	f := failure{class: driver.ClassOf(err), err: err, attempt: m.Attempts + 1}
	policy := rs.cfg.retry(m.Name)
	f.dead = policy.last(f.attempt, f.class)
	if !f.dead {
		f.delay = policy.delay(f.attempt, rs.cfg.Rand())
	}
	return f
}

// quarantine is the outcome of a message that is not published any more, since relays were lost that
// had nothing else in hand.
func quarantine(losses int) []outcome {
	err := fmt.Errorf("%d relays in a row were lost with this message", losses)
	return []outcome{{done: true, err: &driver.PublishError{Class: driver.Quarantined, Err: err}}}
}

func (rs *rounds) report(ctx context.Context, messages []driver.Message, outcomes []outcome, failures map[int]failure) round {
	res := round{claimed: len(messages)}
	for i, o := range outcomes {
		f, failed := failures[i]
		switch {
		case !o.done:
		case !failed:
			res.published++
		default:
			res.failed++
			if f.dead {
				res.dead++
			}
			rs.reportFailure(ctx, messages[i], f)
		}
	}
	rs.telemetry.published.Add(ctx, int64(res.published))
	rs.telemetry.givenBack.Add(ctx, int64(res.claimed-res.published-res.failed))
	return res
}

func (rs *rounds) reportFailure(ctx context.Context, m driver.Message, f failure) {
	rs.telemetry.countFailure(ctx, f)
	text := "outbox: publishing failed, will be tried again"
	if f.dead {
		text = "outbox: publishing failed for good, the message is a dead letter"
	}
	rs.log(ctx, slog.LevelWarn, text, string(f.class)+" "+m.Name, slog.Any("id", m.ID), slog.String("name", m.Name),
		slog.Any("class", f.class), slog.Int("attempt", f.attempt), slog.Any("error", f.err))
}

// maxError bounds the stored text of an error, in bytes.
const maxError = 1000

// errorText is what is stored of an error: bounded, and without what a database refuses.
func errorText(err error) string {
	text := err.Error()
	if len(text) > maxError {
		text = text[:maxError]
	}
	return strings.ReplaceAll(strings.ToValidUTF8(text, ""), "\x00", "")
}
