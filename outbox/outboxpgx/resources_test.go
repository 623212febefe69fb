package outboxpgx_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
	"github.com/holdfast-go/holdfast/outbox/outboxtest"
)

// screen is a log to be read while it is written.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *screen) count(text string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Count(s.text.String(), text)
}

// refuse has Postgres refuse a kind of change of a table, as one that has run out of something does.
func (f *fixture) refuse(t *testing.T, change, table, code string) (lift func()) {
	t.Helper()
	f.exec(t, `
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'run out' USING ERRCODE = '`+code+`'; END $$;
		CREATE TRIGGER refuse BEFORE `+change+` ON `+table+` FOR EACH ROW EXECUTE FUNCTION refuse()`)
	return func() {
		t.Helper()
		f.exec(t, `DROP FUNCTION refuse CASCADE`)
	}
}

// A Postgres that runs out of memory or disk is not the fault of any message: none is accused, what was
// published is settled, and the log names the fault. All goes on when there is room again.
func TestPostgresRunsOut(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ change, table, code string }{
		"disk, dead letters":  {"INSERT", "holdfast_outbox_dead", "53100"},
		"memory, claims":      {"UPDATE", "holdfast_outbox_lanes", "53200"},
		"disk, settlements":   {"DELETE", "holdfast_outbox", "53100"},
		"memory, settlements": {"DELETE", "holdfast_outbox", "53200"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.change == "DELETE" {
				testenv.Nightly(t, "a lane whose settlement failed rests for 30 s")
			}
			f := setup(t, outboxpgx.Config{})
			publisher := outboxtest.NewPublisher()
			publisher.Respond(func(m driver.Message) error {
				if m.Name == "bad" {
					return &driver.PublishError{Class: driver.Permanent, Err: errors.New("refused")}
				}
				return nil
			})
			log := &screen{}
			relay, err := outbox.NewRelay(f.store, publisher, outbox.RelayConfig{
				PollInterval: 50 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(log, nil)),
			})
			must(t, err)
			lift := f.refuse(t, c.change, c.table, c.code)
			f.write(t, keyed(8, 2)...)
			f.write(t, outbox.Message{Name: "bad", Key: "bad", Body: []byte("1")})
			defer run(t, relay)()
			until(t, "the relay is ready, and its store is full", func() bool { return relay.Ready(t.Context()) != nil })
			until(t, "the log does not name the fault", func() bool { return log.count("run out") != 0 })
			lift()
			f.untilEmpty(t, testenv.Patience)
			letters, err := f.dead.List(t.Context(), outbox.Filter{})
			must(t, err)
			if len(letters) != 1 || letters[0].Class != string(driver.Permanent) || letters[0].Attempts != 1 {
				t.Errorf("dead letters %+v", letters)
			}
			testenv.Eventually(t, func() error { return relay.Ready(t.Context()) })
			checkLedger(t, publisher.Received(), 8, 2)
			if c.table == "holdfast_outbox_dead" && len(publisher.Received()) != 16 {
				t.Errorf("%d received, want each of 16 once", len(publisher.Received()))
			}
		})
	}
}
