package faults_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxpgx"
	"github.com/holdfast-go/holdfast/internal/ids"
	"github.com/holdfast-go/holdfast/internal/lab/ledger"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/txretry"
)

// intake is a queue with consumers' tables behind it, and the ledger of what was sent.
type intake struct {
	t    testing.TB
	job  inboxJob
	pool *pgxpool.Pool

	mu   sync.Mutex
	sent map[uuid.UUID]string // what each message does
}

// newIntake lays out queues and tables.
func newIntake(t testing.TB, job inboxJob) *intake {
	t.Helper()
	i := &intake{t: t, job: job, pool: pgtest.Pool(t, job.Database, 4), sent: map[uuid.UUID]string{}}
	manager, err := txretry.New(i.pool, txretry.Config{})
	must(t, err)
	store, err := inboxpgx.New(manager, "faults", inboxpgx.Config{})
	must(t, err)
	must(t, store.Migrate(t.Context()))
	_, err = i.pool.Exec(t.Context(), `CREATE TABLE inbox_effects (message_id uuid NOT NULL, key text NOT NULL, n int NOT NULL, place bigserial)`) // not unique: two effects must show
	must(t, err)
	must(t, i.setup(t.Context()))
	return i
}

// setup bears a broker that is slow, as a consumer with its short heartbeats need not.
func (i *intake) setup(ctx context.Context) error {
	job := i.job
	job.Heartbeat = patience
	c, closeClient, err := job.consumer(inbox.NewMux(), patience)
	if err != nil {
		return err
	}
	defer closeClient()
	return c.Setup(ctx)
}

func (i *intake) event(do string) amqp.Publishing {
	body, err := json.Marshal(inboxEvent{Do: do, Pad: strings.Repeat("x", 200)})
	must(i.t, err)
	return amqp.Publishing{
		MessageId: ids.New().String(), Type: inboxName, ContentType: "application/json", DeliveryMode: amqp.Persistent, Body: body,
	}
}

// confirmPatience bounds one attempt to send. A broker that has just begun may lose a confirm, so it
// is a part of the patience that whoever repeats send has.
const confirmPatience = patience / 6

// send publishes messages of those kinds, and notes what was confirmed.
func (i *intake) send(kinds ...string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(i.t.Context()), confirmPatience)
	defer cancel()
	msgs := make([]amqp.Publishing, len(kinds))
	for k, do := range kinds {
		msgs[k] = i.event(do)
	}
	err := i.publish(ctx, msgs)
	if err == nil {
		i.mu.Lock()
		defer i.mu.Unlock()
		for k, m := range msgs {
			i.sent[uuid.MustParse(m.MessageId)] = kinds[k]
		}
	}
	return err
}

func (i *intake) publish(ctx context.Context, msgs []amqp.Publishing) error {
	if i.job.onRedis() {
		return i.addAll(ctx, msgs)
	}
	return ledger.OnBroker(ctx, i.job.Broker, func(ch *amqp.Channel) error {
		if err := ch.Confirm(false); err != nil {
			return err
		}
		returns := ch.NotifyReturn(make(chan amqp.Return, len(msgs)))
		confirms := make([]*amqp.DeferredConfirmation, len(msgs))
		for k, m := range msgs {
			var err error
			if confirms[k], err = ch.PublishWithDeferredConfirmWithContext(ctx, "", inboxQueue, true, false, m); err != nil {
				return err
			}
		}
		for _, c := range confirms {
			if ok, err := c.WaitContext(ctx); err != nil || !ok {
				return errors.Join(err, errors.New("not confirmed"))
			}
		}
		select {
		case r := <-returns: // it comes before the confirm
			return fmt.Errorf("%s: no queue takes it", r.ReplyText)
		default:
			return nil
		}
	})
}

// mix is what most tests send: one in ten messages fails twice.
func mix(n int, rng *rand.Rand) []string {
	kinds := make([]string, n)
	for k := range kinds {
		if rng.IntN(10) == 0 {
			kinds[k] = doFlaky
		}
	}
	return kinds
}

// effects are how often each message took effect.
func (i *intake) effects() (map[uuid.UUID]int, error) {
	ctx, cancel := context.WithTimeout(i.t.Context(), patience)
	defer cancel()
	rows, _ := i.pool.Query(ctx, `SELECT message_id, count(*) FROM inbox_effects GROUP BY 1`) // ForEachRow returns its error
	found := map[uuid.UUID]int{}
	var id uuid.UUID
	var n int
	_, err := pgx.ForEachRow(rows, []any{&id, &n}, func() error {
		found[id] = n
		return nil
	})
	return found, err
}

func takesEffect(do string) bool { return do == doWell || do == doFlaky }

// missing counts the messages that are to take effect and have not.
func (i *intake) missing() (n int, err error) {
	found, err := i.effects()
	i.mu.Lock()
	defer i.mu.Unlock()
	for id, do := range i.sent {
		if takesEffect(do) && found[id] == 0 {
			n++
		}
	}
	return n, err
}

// settle waits until nothing is missing and nothing is left: what a process had when it was killed is
// left until another one claims it. When the broker ends while it returns a message from a retry queue,
// it tries again: after three minutes, or as soon as testenv has set it.
func (i *intake) settle() {
	i.t.Helper()
	testenv.Eventually(i.t, func() error {
		n, err := i.missing()
		if err != nil {
			return err
		}
		left, err := i.left()
		if err == nil && n+left > 0 {
			err = fmt.Errorf("%d messages have not taken effect, %d are in the queues", n, left)
		}
		return err
	})
}

// left counts what is ready in the queue and its retry queues.
func (i *intake) left() (n int, err error) {
	if i.job.onRedis() {
		return i.leftOnRedis(i.t.Context())
	}
	queues := []string{inboxQueue}
	for _, step := range driver.Steps(i.job.config().Retry) {
		queues = append(queues, fmt.Sprintf("%s.retry.%d", inboxQueue, step.Milliseconds()))
	}
	err = ledger.OnBroker(i.t.Context(), i.job.Broker, func(ch *amqp.Channel) error {
		for _, name := range queues {
			q, err := ch.QueueDeclarePassive(name, true, false, false, false, nil)
			if err != nil {
				return err
			}
			n += q.Messages
		}
		return nil
	})
	return n, err
}

// empty reports whether nothing is left in the queues.
func (i *intake) empty() bool {
	left, err := i.left()
	return err == nil && left == 0
}

// audit fails the test unless each message took effect as often as it should, and nothing is
// left in the queues. The consumers have ended.
func (i *intake) audit() {
	i.t.Helper()
	found, err := i.effects()
	must(i.t, err)
	wrong := 0
	for id, do := range i.sent {
		want := 0
		if takesEffect(do) {
			want = 1
		}
		if found[id] != want {
			wrong++
			i.t.Logf("message %s, %q: %d effects", id, do, found[id])
		}
		delete(found, id)
	}
	if wrong > 0 || len(found) > 0 || len(i.sent) == 0 {
		i.t.Errorf("of %d messages %d took effect wrongly, %d effects are of no message", len(i.sent), wrong, len(found))
	}
	untilTrue(i.t, "the queues are empty", i.empty)
}

// dead lists the dead letters by message id.
func (i *intake) dead() map[uuid.UUID][]inbox.DeadLetter {
	i.t.Helper()
	c, closeClient, err := i.job.consumer(inbox.NewMux(), 5*time.Second)
	must(i.t, err)
	defer closeClient()
	var all []inbox.DeadLetter
	testenv.Eventually(i.t, func() (err error) { // a busy queue still holds what was listed before
		all, err = c.DeadLetters().List(i.t.Context(), inbox.Filter{Limit: math.MaxInt})
		return err
	})
	byID := map[uuid.UUID][]inbox.DeadLetter{}
	for _, d := range all {
		byID[d.Message.ID] = append(byID[d.Message.ID], d)
	}
	return byID
}

// noneDead is for faults that are no message's.
func (i *intake) noneDead() {
	i.t.Helper()
	for id, letters := range i.dead() {
		i.t.Errorf("message %s, %q, is dead: %s at attempt %d: %s", id, i.sent[id], letters[0].Class, letters[0].Attempts, letters[0].Error)
	}
}

// start runs a consumer in this process until stop is called.
func (i *intake) start() (stop func()) {
	return beside(i.t, func(ctx context.Context) error { return i.job.run(ctx, func() {}) })
}
