package inboxredis

import (
	"bytes"
	"context"
	"maps"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/internal/inbox/record"
	"github.com/holdfast-go/holdfast/internal/wire"
)

// maxPipeline bounds the bytes of bodies in one pipeline, so that the timeout suffices on a slow connection.
const maxPipeline = 4 << 20

// tailDelay is the delay of a message that goes behind the others, because retries come first.
const tailDelay = time.Second

// order is a move as arguments of the script.
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
		target, fields = g.keys.dead(g.cfg.DeadLetterPrefix, g.cfg.place(m.DeadLetter.Class)), copied(d.fields, record.Dead(m.DeadLetter))
	case driver.ToLater:
		target, fields = g.keys.waiting(m.PutOff), copied(d.fields, record.Next(d.Message(), m.Next))
		delay = millis(m.Delay)
	default:
		target, fields = g.keys.waiting(m.PutOff), copied(d.fields, record.Next(d.Message(), m.Next))
		delay = millis(tailDelay)
	}
	keys := []string{g.keys.read()[d.stream], target, g.keys.owner()}
	return &order{d, keys, append([]any{g.cfg.ConsumerConfig.Name, leaseToken(g.cfg, d.session.name), d.session.name, d.id, delay}, fields...), result}
}

// millis rounds up, so that a retry is never early.
func millis(d time.Duration) string {
	return strconv.FormatInt(max(d+time.Millisecond-1, 0).Milliseconds(), 10)
}

// portion returns how many orders form a pipeline, at least one.
func portion(orders []*order) int {
	size := 0
	for n, o := range orders {
		if size += len(o.delivery.Message().Body); size > maxPipeline && n > 0 {
			return n
		}
	}
	return len(orders)
}

// fail sets the same result for all orders.
func fail(orders []*order, err error) {
	for _, o := range orders {
		*o.result = classify(err)
	}
}

// move runs one pipeline. It returns an error only if no order was answered.
func (g *group) move(ctx context.Context, orders []*order) error {
	answers, err := within(ctx, g, func(ctx context.Context) ([]*redis.Cmd, error) {
		pipe := g.client.Pipeline()
		answers := make([]*redis.Cmd, len(orders))
		for i, o := range orders {
			answers[i] = moveScript.EvalSha(ctx, pipe, o.keys, o.args...)
		}
		_, _ = pipe.Exec(ctx) // each answer has its own error
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
	g.test(ctx, last) // a silent connection leaves all later answers out
	if first := answers[0].Err(); isTimeout(first) {
		return first // answers arrive in order, so none arrived within the client's own timeout
	}
	return nil
}

// moved returns the result. An entry without an owner was moved before, because the client repeated the command.
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

// copied returns the fields of a copy as command arguments: all fields of the sender, and our non-empty fields.
func copied(fields map[string]any, own map[string]string) []any {
	foreign := make(map[string]any, len(fields))
	for name, value := range fields {
		if !wire.Own(name) {
			foreign[name] = value
		}
	}
	var all []any
	for name, value := range packed(foreign) {
		all = append(all, name, value)
	}
	for name, value := range own {
		if value != "" {
			all = append(all, name, value)
		}
	}
	return all
}

// edited returns the fields with another body, if the body is a field of its own.
func edited(fields map[string]any, was, is []byte) (map[string]any, error) {
	all := maps.Clone(unpacked(fields))
	unreadable := all[fieldPacked] != nil
	if unreadable || text(all[fieldSymfony]) != "" || !bytes.Equal([]byte(text(all[fieldBody])), was) {
		return nil, driver.ErrNotEditable
	}
	all[fieldBody] = string(is)
	return all, nil
}
