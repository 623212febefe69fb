package operator_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/examples/operator"
	"github.com/holdfast-go/holdfast/inbox"
)

func TestStatus(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.wants(t, 0, []string{"status"}, "OUTBOX", "billing", "unrecoverable 3", "holds", "2")
	var s struct {
		Outboxes []struct {
			Name string
			Dead int
		}
		Consumers []struct{ Dead map[string]int }
		Sweeps    []struct{ Overdue int }
	}
	check(t, json.Unmarshal([]byte(r.wants(t, 0, []string{"status", "--json"})), &s))
	if s.Outboxes[0].Name != "outbox" || s.Outboxes[0].Dead != 2 || s.Consumers[0].Dead["unrecoverable"] != 3 || s.Sweeps[0].Overdue != 2 {
		t.Errorf("%+v", s)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	screens, errs := 0, bytes.Buffer{}
	out := writerFunc(func(screen []byte) {
		if screens += bytes.Count(screen, []byte("OUTBOX")); screens == 2 {
			stop() // as an interrupt does
		}
	})
	if code := r.Run(ctx, []string{"status", "--watch=10ms"}, out, &errs); code != 0 || screens < 2 || errs.Len() > 0 {
		t.Errorf("--watch exits with %d after %d screens: %q", code, screens, errs.String())
	}
}

// writerFunc sees what is written.
type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) {
	f(p)
	return len(p), nil
}

// A part whose server is down neither hides the others nor what is wrong.
func TestPartsThatCannotBeAsked(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.cfg.Consumers = append(r.cfg.Consumers, operator.Consumer{Name: "gone", Consumer: gone{}})
	r.cfg.Servers = []operator.Server{{Name: "RabbitMQ", Ping: func(context.Context) error { return errGone }}}
	r.Operator = must(operator.New(r.cfg))(t)
	for _, args := range [][]string{{"status"}, {"inbox", "dead"}, {"groups"}} {
		code, out, errs := r.run(t, args...)
		if code != 1 || !strings.Contains(out, "billing") || !strings.Contains(errs, "gone: nobody is there") || strings.Count(errs, "\n") != 1 {
			t.Errorf("%q exits with %d: %q %q", args, code, out, errs)
		}
	}
	if code, out, _ := r.run(t, "doctor", "--json"); code != 1 || out != "[]\n" {
		t.Errorf("doctor --json exits with %d: %q", code, out)
	}
	code, out, errs := r.run(t, "doctor")
	if code != 1 || out != "" || errs != "holdfast: RabbitMQ cannot be asked: nobody is there\n" {
		t.Errorf("doctor exits with %d: %q %q", code, out, errs)
	}
}

var errGone = errors.New("nobody is there")

// gone is a consumer whose broker is down.
type gone struct{}

func (gone) DeadLetters() inbox.DeadLetters             { return noLetters{} }
func (gone) Stats(context.Context) (inbox.Stats, error) { return inbox.Stats{}, errGone }

type noLetters struct{ inbox.DeadLetters }

func (noLetters) List(context.Context, inbox.Filter) ([]inbox.DeadLetter, error) { return nil, errGone }

func (noLetters) Groups(context.Context, inbox.Filter) ([]inbox.Group, error) { return nil, errGone }
