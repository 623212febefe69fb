package inboxamqp_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/inbox"
	"github.com/holdfast-go/holdfast/internal/amqptest"
)

// Each change of dead letters leaves a record of who made it, why, of which and of how many.
func TestAudit(t *testing.T) {
	t.Parallel()
	b := amqptest.New(t)
	b.Queue(t, "orders", nil)
	b.Queue(t, "failed.default", nil)
	for range 3 {
		p := order()
		p.Headers = map[string]any{"holdfast-origin-queue": "orders", "holdfast-failure-class": "default"}
		b.Publish(t, "", "failed.default", p)
	}
	var log logBuffer
	letters := newDeadLetters(t, b, config{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if _, err := letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{DryRun: true}); err != nil || log.String() != "" {
		t.Fatalf("a dry run: %v, log %q", err, log.String())
	}
	if _, err := letters.Replay(t.Context(), inbox.Filter{Limit: 1}, inbox.Replay{By: "ann", Reason: "mended"}); err != nil {
		t.Fatal(err)
	}
	if n, err := letters.Remove(t.Context(), inbox.Filter{Class: "default"}, inbox.Removal{By: "bob"}); err != nil || n != 2 {
		t.Fatal(n, err)
	}
	for _, want := range []string{
		`msg="dead letters returned" component=inboxamqp queue=orders prefix="" by=ann reason=mended filter.limit=1 returned=1 outlived=0 failed=0`,
		`msg="dead letters removed" component=inboxamqp queue=orders prefix="" by=bob reason="" filter.class=default removed=2`,
	} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("no %s in\n%s", want, log.String())
		}
	}
	for name, err := range map[string]error{
		"nobody removes":      second(letters.Remove(t.Context(), inbox.Filter{}, inbox.Removal{})),
		"nobody returns":      second(letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{})),
		"two lines":           second(letters.Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: "a\nb"})),
		"a very long reason":  second(letters.Replay(t.Context(), inbox.Filter{}, inbox.Replay{By: "a", Reason: strings.Repeat("r", 1001)})),
		"a name of 129 bytes": second(letters.Remove(t.Context(), inbox.Filter{}, inbox.Removal{By: strings.Repeat("a", 129)})),
	} {
		if err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func second[T any](_ T, err error) error { return err }
