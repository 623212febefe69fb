package outboxpgx_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	ossignal "os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/outbox"
	"github.com/holdfast-go/holdfast/outbox/driver"
	"github.com/holdfast-go/holdfast/outbox/outboxpgx"
)

// A relay in a process of its own: the test binary, started again with these set.
const (
	crashURL    = "HOLDFAST_CRASH_POSTGRES_URL"
	crashLedger = "HOLDFAST_CRASH_LEDGER" // the file that it publishes to
)

const (
	poison    = `"poison"`
	crashCode = 137
)

// crashRelay runs until it is interrupted, or meets the poison.
func crashRelay() int {
	ctx, stop := ossignal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv(crashURL))
	if err != nil {
		return 1
	}
	defer pool.Close()
	ledger, err := os.OpenFile(os.Getenv(crashLedger), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return 1
	}
	defer ledger.Close()
	store, err := outboxpgx.New(pool, outboxpgx.Config{})
	if err != nil {
		return 1
	}
	relay, err := outbox.NewRelay(store, deadly{ledger}, outbox.RelayConfig{
		LeaseTTL: 3 * time.Second, PublishTimeout: time.Second,
		ShutdownTimeout: 2 * time.Second, PollInterval: 20 * time.Millisecond, Logger: quiet,
	})
	if err != nil || relay.Run(ctx) != nil {
		return 1
	}
	return 0
}

// deadly publishes to a file, and ends the process over the poison.
type deadly struct{ ledger *os.File }

func (d deadly) Publish(_ context.Context, m driver.Message, done func(error)) {
	if string(m.Body) == poison {
		os.Exit(crashCode)
	}
	_, err := fmt.Fprintf(d.ledger, "%s %s\n", m.Key, m.Body)
	done(err)
}

// One message ends every process that publishes it. It is found out among the others of its lane, and
// everything else is published, in order.
func TestPoisonIsQuarantined(t *testing.T) {
	t.Parallel()
	testenv.Nightly(t, "processes crash until a message is found guilty")
	f := setup(t, outboxpgx.Config{})
	const keys, n = 20, 10
	msgs := keyed(keys, n)
	at := len(msgs) / 2
	f.write(t, msgs[:at]...)
	f.write(t, outbox.Message{Name: "bad", Key: "key-3", Body: []byte(poison)})
	f.write(t, msgs[at:]...)
	path := t.TempDir() + "/ledger"
	must(t, os.WriteFile(path, nil, 0o600))

	exe, err := os.Executable()
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	crashes := make(chan int, 1)
	go func() {
		n := 0
		defer func() { crashes <- n }()
		for ctx.Err() == nil {
			cmd := exec.CommandContext(ctx, exe)
			cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
			cmd.Env = append(os.Environ(), crashURL+"="+f.pool.Config().ConnString(), crashLedger+"="+path)
			switch _ = cmd.Run(); cmd.ProcessState.ExitCode() {
			case crashCode:
				n++
			case 1:
				t.Error("a relay could not run")
				return
			}
		}
	}()
	f.untilEmpty(t, testenv.Patience)
	cancel()
	got := <-crashes
	if got < 4 || got > 9 {
		t.Errorf("%d processes were lost", got)
	}
	t.Logf("%d processes were lost", got)

	letters, err := f.dead.List(t.Context(), outbox.Filter{})
	must(t, err)
	if len(letters) != 1 || string(letters[0].Body) != poison || letters[0].Class != string(driver.Quarantined) {
		t.Fatalf("dead letters %+v", letters)
	}
	ledger, err := os.ReadFile(path)
	must(t, err)
	var received []driver.Message
	for line := range strings.Lines(string(ledger)) {
		key, body, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		received = append(received, driver.Message{Key: key, Body: []byte(body)})
	}
	checkLedger(t, received, keys, n)
}
