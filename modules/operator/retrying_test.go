package operator_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/agents"
	"github.com/holdfast-go/holdfast/modules/operator/page"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// Commands list the messages of an outbox that wait, make them due now or later, and drop them.
func TestRetrying_outbox(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, name := range []string{"now", "later", "gone"} {
		r.write(name, time.Now().Add(time.Hour))
	}
	r.wants(t, 0, []string{"outbox", "parked"}, "key now", "key later", "key gone", "DUE")
	r.wants(t, 0, []string{"outbox", "parked", "--key=key now"}, "key now")
	r.wants(t, 0, []string{"outbox", "pending"})
	r.wants(t, 0, []string{"show", r.ids["later"].String()}, "due: ", "key later")
	r.wants(t, 0, []string{"groups", "--retrying"}, "outbox  -      3")

	r.wants(t, 0, []string{"postpone", r.ids["later"].String(), "--for=23h", "--by=ada", "--dry-run"}, "outbox: 1 would be postponed")
	r.wants(t, 0, []string{"postpone", r.ids["later"].String(), "--for=23h", "--by=ada", "--reason=the broker is down"}, "outbox: 1 postponed")
	r.wants(t, 0, []string{"drop", "--retrying", "--name=gone", "--by=ada"}, "outbox: 1 dropped")
	r.wants(t, 0, []string{"retry", "--retrying", r.ids["now"].String(), "--by=ada"}, "outbox: 1 retried")
	if body := r.published(t, "now"); body == "" || r.sent["later"] != "" || r.sent["gone"] != "" {
		t.Errorf("published: %v", r.sent)
	}
	r.wants(t, 0, []string{"outbox", "parked"}, "key later", time.Now().Add(23*time.Hour).UTC().Format("2006-01-02"))
	r.wants(t, 0, []string{"outbox", "dead"}, "no exchange a") // dead letters are another list
	r.wants(t, 0, []string{"log"}, "postpone", "the broker is down", "--retrying "+r.ids["later"].String(), `--retrying --name="gone"`)

	for _, args := range [][]string{
		{"postpone", "--all", "--by=ada"}, {"postpone", "--for=1h", "--by=ada"}, {"drop", "--retrying", "--by=ada"}, {"outbox", "parked", "--limit=-1"},
	} {
		r.wants(t, 2, args)
	}
	for _, args := range [][]string{
		{"postpone", "--all", "--for=25h", "--by=ada"}, {"retry", "--retrying", r.ids["a"].String(), "--by=ada"},
		{"outbox", "parked", "--since=1h"},
	} {
		r.wants(t, 1, args)
	}
}

// The page previews a change of waiting messages, asks for the delay, and logs the reason.
func TestPage_retrying(t *testing.T) {
	t.Parallel()
	s := newSite(t, page.Config{Authorize: everything})
	for _, name := range []string{"now", "later"} {
		s.write(name, time.Now().Add(time.Hour))
	}
	list := s.get(t, "retrying", 200, "key now", "key later", "Preview marked")
	if !strings.Contains(list, `name="retrying" value="1"`) || !strings.Contains(list, `aria-current="page">Retrying`) {
		t.Errorf("the list is %s", list)
	}
	s.get(t, "retrying?name=now", 200, "1 in all")
	s.get(t, "", 200, `href="retrying?from=outbox"`)
	one := url.Values{"retrying": {"1"}, "id": {"outbox/" + s.ids["later"].String()}, "from": {"outbox"}}
	s.get(t, "dead-letter?"+one.Encode(), 200, "Waiting message", "key later", "due in", "Postpone")

	one.Set("what", "postpone")
	s.get(t, "preview?"+one.Encode(), 200, `<span class="count">1</span>`, "would be postponed", `name="delay"`, `value="30m"`, "Postpone 1", `name="retrying" value="1"`)
	for field, value := range map[string]string{"delay": "soon", "edited": "{}"} {
		bad := url.Values{field: {value}}
		for name, values := range one {
			bad[name] = values
		}
		s.post(t, "apply", bad, 400)
	}
	one.Set("delay", "2h")
	one.Set("reason", "maintenance")
	s.job(t, one, "Postpone, started by ada")
	s.get(t, "job?id=1", 200, "1 postponed", "Show retrying")
	parked := s.cfg.Outboxes[0].Store.(*outboxtest.Store).Parked()
	later, err := parked.Show(t.Context(), s.ids["later"])
	if wait := time.Until(later.DueAt); err != nil || wait < 90*time.Minute || wait > 2*time.Hour {
		t.Errorf("postponed to %v, %v", later.DueAt, err)
	}

	all := url.Values{"retrying": {"1"}, "what": {"retry"}, "matching": {"1"}, "name": {"now"}}
	if body := s.post(t, "preview", all, 200, "would be due now", "Retry 1"); strings.Contains(body, "Edit bodies") || strings.Contains(body, `name="until"`) {
		t.Errorf("the preview is %s", body)
	}
	s.job(t, all)
	s.get(t, "job?id=2", 200, "1 retried")
	if body := s.published(t, "now"); body == "" || s.sent["later"] != "" {
		t.Errorf("published: %v", s.sent)
	}
	s.get(t, "log", 200, "maintenance", "--retrying "+s.ids["later"].String())
	s.get(t, "preview?what=postpone&from=outbox", 400) // dead letters do not wait

	readOnly := serve(t, s.rig, page.Config{})
	if body := readOnly.get(t, "retrying", 200, "key later"); strings.Contains(body, "preview") {
		t.Errorf("a reader sees %s", body)
	}
}

// Commands and page list the messages of a consumer that wait for their next attempt, and start it.
func TestRetrying_consumer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	fixed := atomic.Bool{}
	mux := inbox.NewMux()
	mux.Fallback(func(_ context.Context, m *inbox.Message) error {
		if fixed.Load() {
			return nil
		}
		return errors.New("no answer from the bank for " + m.Name)
	})
	broker := inboxtest.NewBroker()
	retry := inbox.RetryPolicy{BaseDelay: time.Hour, MaxDelay: time.Hour}
	consumer := must(inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "payments"}, mux, inbox.ConsumerConfig{Logger: quiet, Retry: retry}))(t)
	r.cfg.Consumers = append(r.cfg.Consumers, operator.Consumer{Name: "payments", Consumer: consumer})
	for _, name := range []string{"x", "y", "z"} {
		r.ids[name] = must(uuid.NewV7())(t)
		check(t, broker.Send(t.Context(), &inbox.Message{ID: r.ids[name], Name: name, Body: []byte("{}")}))
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- consumer.Run(ctx) }()
	wantRetrying := func(want int) {
		t.Helper()
		testenv.Eventually(t, func() error {
			if s, err := consumer.Stats(t.Context()); err != nil || s.Retrying != want {
				return fmt.Errorf("%+v, %v", s, err)
			}
			return nil
		})
	}
	wantRetrying(3)
	r.wants(t, 0, []string{"inbox", "retrying"}, "no answer from the bank for x", "1         retry")
	r.wants(t, 0, []string{"groups", "--retrying", "--from=payments"}, "1      retry  x")
	r.wants(t, 0, []string{"show", r.ids["y"].String()}, "due: ", "no answer from the bank for y")
	s := serve(t, r, page.Config{Authorize: everything})
	s.get(t, "retrying", 200, "no answer from the bank for x", "3 in all")
	s.get(t, "", 200, `href="retrying?from=payments"`)
	r.wants(t, 0, []string{"postpone", "--from=payments", "--name=y", "--for=2h", "--by=ada"}, "payments: 1 postponed")
	r.wants(t, 0, []string{"drop", "--retrying", "--from=payments", "--name=z", "--by=ada"}, "payments: 1 dropped")
	fixed.Store(true)
	s.job(t, url.Values{"retrying": {"1"}, "what": {"retry"}, "id": {"payments/" + r.ids["x"].String()}})
	wantRetrying(1)
	testenv.Eventually(t, func() error { // it may wait for the consumer
		if consumer.Counts().Done == 0 {
			return errors.New("nothing was processed")
		}
		return nil
	})
	stop()
	check(t, <-ended)
	if done := consumer.Counts().Done; done != 1 {
		t.Errorf("%d were processed, want 1", done)
	}
	r.wants(t, 0, []string{"log"}, "postpone", "--retrying --name=\"y\"", "--retrying "+r.ids["x"].String())
}

// A server that cannot list messages that wait is named.
func TestRetrying_unlisted(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Consumers = []operator.Consumer{{Name: "billing", Consumer: onlyDeadLetters{r.cfg.Consumers[0].Consumer}}}
	serve(t, r, page.Config{}).get(t, "retrying", 200, "The server of billing cannot list messages that wait")
	code, _, errs := r.run(t, "inbox", "retrying")
	if code != 0 || !strings.Contains(errs, "billing: its server cannot list messages that wait") {
		t.Errorf("exit code %d: %s", code, errs)
	}
	r.wants(t, 2, []string{"inbox", "retrying", "--from=billing"})
	r.wants(t, 2, []string{"postpone", "--for=1h", "--all", "--from=billing", "--by=ada"})
}

// onlyDeadLetters is a consumer of a server that cannot list messages that wait.
type onlyDeadLetters struct{ operator.DeadLetterer }

func TestMCP_retrying(t *testing.T) {
	t.Parallel()
	a := newAgent(t, agents.Config{Access: operator.Access{By: "ada", Change: true}})
	a.write("now", time.Now().Add(time.Hour))
	a.answers(t, "dead_letters", map[string]any{"retrying": true}, "key now", "due_at", "!no exchange")
	a.answers(t, "retry", map[string]any{"retrying": true, "name": "now", "reason": "fixed"}, `"count":1`)
	if a.published(t, "now") == "" {
		t.Errorf("published: %v", a.sent)
	}
}

// One list of waiting messages is read at a time: consumers on RabbitMQ share the queues of these messages.
func TestRetrying_oneReaderAtATime(t *testing.T) {
	t.Parallel()
	var readers shared
	cfg := operator.Config{Consumers: []operator.Consumer{{Name: "a", Consumer: &readers}, {Name: "b", Consumer: &readers}}}
	s := serve(t, &rig{cfg: cfg}, page.Config{Authorize: everything})
	var asking sync.WaitGroup
	for _, name := range []string{"a", "b", "a", "b"} {
		asking.Go(func() { s.get(t, "retrying?from="+name+"&again=1", 200) })
	}
	asking.Wait()
	if readers.most.Load() != 1 || readers.all.Load() < 2 {
		t.Errorf("%d reads, %d at once", readers.all.Load(), readers.most.Load())
	}
}

// shared is a consumer that counts the reads of its waiting messages.
type shared struct {
	gone
	noLetters
	now, most, all atomic.Int32
}

func (s *shared) DeadLetters() inbox.DeadLetters { return s }
func (s *shared) Retrying() inbox.DeadLetters    { return s }

func (s *shared) List(context.Context, inbox.Filter) ([]inbox.DeadLetter, error) {
	s.most.Store(max(s.most.Load(), s.now.Add(1)))
	defer s.now.Add(-1)
	s.all.Add(1)
	time.Sleep(20 * time.Millisecond) // timing: others would read meanwhile
	return nil, nil
}
