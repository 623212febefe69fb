package operator_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/inbox/driver"
	"github.com/holdfast-go/holdfast/inbox/inboxtest"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/agents"
	"github.com/holdfast-go/holdfast/modules/operator/history"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/modules/operator/page"
)

// goes runs a part until the returned function is called.
func goes(t *testing.T, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		check(t, <-ended)
	}
}

// A running process is listed with its roles and its message in work, and no longer when it has ended.
func TestRunning(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	began, release := make(chan struct{}), make(chan struct{})
	mux := inbox.NewMux()
	mux.Fallback(func(context.Context, *inbox.Message) error { close(began); <-release; return nil })
	broker := inboxtest.NewBroker()
	consumer := must(inboxtest.NewConsumer(broker, inboxtest.Queue{Name: "letters"}, mux, inbox.ConsumerConfig{Logger: quiet}))(t)
	r.cfg.Consumers = append(r.cfg.Consumers, operator.Consumer{Name: "mail", Consumer: consumer})
	r.cfg.Outboxes[0].Relay = nil
	kept := &operator.MemoryHistory{}
	r.cfg.History = kept
	id := must(uuid.NewV7())(t)
	check(t, broker.Send(t.Context(), &inbox.Message{ID: id, Name: "order.placed", Key: "ada", Body: []byte("{}")}))
	endConsumer := goes(t, consumer.Run)
	<-began
	endRecorder := goes(t, must(history.New(r.cfg))(t).Run)
	testenv.Eventually(t, func() error {
		if len(must(kept.Processes(t.Context()))(t)) == 0 {
			return errors.New("no process has reported")
		}
		return nil
	})
	r.wants(t, 0, []string{"running"}, "PROCESS", "consumer mail", "AGE", "order.placed", "ada", id.String())
	var shown core.Running
	check(t, json.Unmarshal([]byte(r.wants(t, 0, []string{"running", "--json"})), &shown))
	if len(shown.Processes) != 1 || strings.Join(shown.Processes[0].Roles, ",") != "consumer mail" || shown.InWork != 1 || len(shown.Slowest) != 1 ||
		shown.Slowest[0].Consumer != "mail" || shown.Slowest[0].ID != id || shown.Slowest[0].Late {
		t.Errorf("running: %+v", shown)
	}
	s := serve(t, r, page.Config{})
	s.get(t, "running", 200, "1 process, 1 message in work", "order.placed", "consumer mail", `data-stream="running?live=1"`, "Leases")
	close(release)
	endConsumer()
	endRecorder()
	if left := must(kept.Processes(t.Context()))(t); len(left) != 0 {
		t.Errorf("after the end: %+v", left)
	}
}

// listed is a history with these processes.
type listed struct {
	operator.MemoryHistory
	all []operator.Process
	err error
}

func (l *listed) Processes(context.Context) ([]operator.Process, error) { return l.all, l.err }

// A message beyond the time of its handler, a process without reports and a second version stand out.
func TestRunning_standsOut(t *testing.T) {
	t.Parallel()
	now := time.Now()
	working := func(name string, age time.Duration) driver.Running {
		return driver.Running{Consumer: "billing", Name: name, Since: now.Add(-age), Until: now.Add(time.Minute - age)}
	}
	live := operator.Process{
		Host: "one", PID: 1, Version: "v1.8.2", Roles: []string{"consumer billing"}, Since: now.Add(-time.Hour), Seen: now, InWork: 12,
		Slowest: []driver.Running{working("late", 2*time.Minute), working("young", time.Second)},
	}
	other, gone := live, live
	other.Host, other.Version, other.InWork = "two", "v1.9.0", 9
	other.Slowest = nil
	for range 9 {
		other.Slowest = append(other.Slowest, working("middle", 30*time.Second))
	}
	gone.Host, gone.Version, gone.Seen, gone.Slowest = "three", "v1.7.0", now.Add(-40*time.Second), []driver.Running{working("lost", time.Hour)}
	r := newRig(t)
	r.cfg.History = &listed{all: []operator.Process{live, other, gone}}
	out := r.wants(t, 0, []string{"running"}, "2m0s, too long", "gone, 40", "2 versions run at once: v1.8.2, v1.9.0")
	if strings.Contains(out, "young") || strings.Contains(out, "lost") || strings.Count(out, "middle") != 9 || strings.Index(out, "late") > strings.Index(out, "middle") {
		t.Errorf("these are not the slowest ten: %s", out)
	}
	serve(t, r, page.Config{}).get(t, "running", 200, "2 processes, 21 messages in work", "The slowest 10 of 21.", "too long", "2 versions run at once: v1.8.2, v1.9.0",
		"last seen 40 s ago")
	newAgent(t, agents.Config{}, func(c *operator.Config) { c.History = r.cfg.History }).answers(t, "running", nil, `"in_work":21`, `"late":true`, `"gone":true`)
}

// Without a history the view explains how to get one. A history that fails is reported.
func TestRunning_unknown(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if code, _, errs := r.run(t, "running"); code != 2 || !strings.Contains(errs, "running: the processes are unknown") {
		t.Errorf("it exits with %d and prints %q", code, errs)
	}
	serve(t, r, page.Config{}).get(t, "running", 200, "operator.Config.History", "Leases")
	r.cfg.History = &operator.MemoryHistory{}
	serve(t, r, page.Config{}).get(t, "running", 200, "No process reports.")
	r.cfg.History = &listed{err: errors.New("it is down")}
	if code, _, errs := r.run(t, "running"); code != 1 || !strings.Contains(errs, "running: it is down") {
		t.Errorf("it exits with %d and prints %q", code, errs)
	}
	serve(t, r, page.Config{}).get(t, "running", 200, "it is down")
}
