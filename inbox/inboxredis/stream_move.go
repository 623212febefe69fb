package inboxredis

import (
	"context"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
)

// maxPipeline is how many bytes of bodies one pipeline has, so that the timeout suffices for it on a
// slow way to the server.
const maxPipeline = 4 << 20

// tailDelay is how long a message waits that goes behind the others: retries come first.
const tailDelay = time.Second

// order is a move as the script takes it.
type order struct {
	delivery *delivery
	keys     []string
	args     []any
	result   *error
}

func (g *group) order(m driver.Move, result *error) *order {
	d := m.Delivery.(*delivery)
	var delay, target string
	var fields []any
	switch m.Target {
	case driver.ToDead:
		target, fields = g.keys.dead(g.cfg.DeadLetterPrefix, g.cfg.place(m.Letter.Class)), deadCopy(d, m.Letter)
	case driver.ToLater:
		target, fields = g.keys.waiting(m.PutOff), retryCopy(d, m.Next)
		delay = millis(m.Delay)
	default:
		target, fields = g.keys.waiting(m.PutOff), retryCopy(d, m.Next)
		delay = millis(tailDelay)
	}
	keys := []string{g.keys.read()[d.stream], target, g.keys.owner()}
	return &order{d, keys, append([]any{g.cfg.Group, leaseToken(g.cfg, d.session.name), d.session.name, d.id, delay}, fields...), result}
}

// millis rounds up: a retry comes not before its time.
func millis(d time.Duration) string {
	return strconv.FormatInt(max(d+time.Millisecond-1, 0).Milliseconds(), 10)
}

// portion returns how many orders make a pipeline, at least one.
func portion(orders []*order) int {
	size := 0
	for n, o := range orders {
		if size += len(o.delivery.Message().Body); size > maxPipeline && n > 0 {
			return n
		}
	}
	return len(orders)
}

// fail gives all the same result.
func fail(orders []*order, err error) {
	for _, o := range orders {
		*o.result = classify(err)
	}
}

// move runs one pipeline. The error is that of all, when none was answered.
func (g *group) move(ctx context.Context, orders []*order) error {
	answers, err := within(ctx, g, func(ctx context.Context) ([]*redis.Cmd, error) {
		pipe := g.client.Pipeline()
		answers := make([]*redis.Cmd, len(orders))
		for i, o := range orders {
			answers[i] = moveScript.EvalSha(ctx, pipe, o.keys, o.args...)
		}
		_, _ = pipe.Exec(ctx) // each answer has its error
		for i, o := range orders {
			if redis.HasErrorPrefix(answers[i].Err(), "NOSCRIPT") {
				answers[i] = moveScript.Eval(ctx, g.client, o.keys, o.args...)
			}
		}
		return answers, nil
	})
	if err != nil {
		return err
	}
	var last error
	for i, o := range orders {
		answer, failed := answers[i].Int64()
		*o.result = o.moved(answer, failed)
		last = failed
	}
	g.test(ctx, last) // a connection that falls silent answers none after that
	if first := answers[0].Err(); isTimeout(first) {
		return first // answers come in order, so there was none within the client's own timeout
	}
	return nil
}

// moved returns the result. An entry without an owner was moved before: the client has repeated
// itself.
func (o *order) moved(answer int64, err error) error {
	if err != nil {
		return classify(err)
	}
	o.delivery.session.hand.forget(o.delivery)
	if answer < 0 {
		return stale(1)
	}
	return nil
}
