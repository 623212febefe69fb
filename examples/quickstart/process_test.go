package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
)

// TestMain runs the program instead of the tests if the binary has the program's name. Tests start it by a link.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "quickstart" {
		main()
		return
	}
	os.Exit(testenv.Run(m))
}

// The program starts on an empty schema and an empty virtual host, accepts orders, and bills each of them once.
func TestQuickstart_onEmptyServers(t *testing.T) {
	t.Parallel()
	database, broker := pgtest.URL(t), amqptest.New(t)
	p := start(t, append(os.Environ(), "DATABASE_URL="+database, "AMQP_URL="+broker.URL), "-backend=services")
	conn, err := pgx.Connect(t.Context(), database)
	noError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	const orders = 5
	for range orders {
		p.billed(t, conn)
	}
	p.stop(t)
	var invoices int
	if err := conn.QueryRow(t.Context(), "SELECT count(*) FROM invoices").Scan(&invoices); err != nil || invoices != orders {
		t.Errorf("%d invoices of %d orders, %v", invoices, orders, err)
	}
}

// billed sends an order, and waits for its invoice.
func (p *program) billed(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	id := p.order(t)
	testenv.Eventually(t, func() error {
		var n int
		err := conn.QueryRow(t.Context(), "SELECT count(*) FROM invoices WHERE order_id = $1", id).Scan(&n)
		if err == nil && n == 0 {
			err = fmt.Errorf("order %s is not billed", id)
		}
		return err
	})
}

// Orders are accepted while the broker is down at the start. The parts that need the broker are not ready.
func TestQuickstart_withoutBroker(t *testing.T) {
	t.Parallel()
	p := start(t, append(os.Environ(), "DATABASE_URL="+pgtest.URL(t), "AMQP_URL=amqp://127.0.0.1:1/"), "-backend=services")
	p.order(t)
	testenv.Eventually(t, func() error {
		answer, err := http.Get(strings.TrimSuffix(p.url, "/orders") + "/readyz")
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		if err == nil && (answer.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(body), `["billing","relay"]`)) {
			err = fmt.Errorf("%s: %s", answer.Status, body)
		}
		return err
	})
	p.stop(t)
}

// The program writes to no server that nobody named.
func TestQuickstart_addresses(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	noError(t, err)
	binary := filepath.Join(t.TempDir(), "quickstart")
	noError(t, os.Symlink(self, binary))
	for _, name := range []string{"DATABASE_URL", "AMQP_URL"} {
		cmd := exec.CommandContext(t.Context(), binary, "-backend=services", "-addr=127.0.0.1:0")
		cmd.Env = append(os.Environ(), "DATABASE_URL=postgres://x@127.0.0.1:1/x", "AMQP_URL=amqp://127.0.0.1:1/", name+"=")
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), name+" is not set") {
			t.Errorf("without %s: %v, %s", name, err, out)
		}
	}
}

// The printed command line works.
func TestQuickstart_printedLine(t *testing.T) {
	t.Parallel()
	p := start(t, os.Environ())
	curl, err := exec.LookPath("curl")
	if err != nil {
		p.order(t)
		p.stop(t)
		return
	}
	args := regexp.MustCompile(`'[^']*'|\S+`).FindAllString(p.curl, -1)
	for i, arg := range args {
		args[i] = strings.Trim(arg, "'")
	}
	out, err := exec.CommandContext(t.Context(), curl, append(args[1:], "-s")...).Output()
	if err != nil || !strings.Contains(string(out), "201 Created") || !strings.Contains(string(out), `"cents":4200`) {
		t.Errorf("%s: %v\n%s", p.curl, err, out)
	}
	p.stop(t)
}

// program is a running quickstart.
type program struct {
	cmd   *exec.Cmd
	curl  string // the line it prints
	url   string
	ended chan struct{} // closed at its end
	err   error         // result of Wait
}

var curlLine = regexp.MustCompile(`^curl .*(http://[^/]+/orders)`)

// start runs the program on a free port, and waits until it listens.
func start(t *testing.T, env []string, args ...string) *program {
	t.Helper()
	self, err := os.Executable()
	noError(t, err)
	binary := filepath.Join(t.TempDir(), "quickstart")
	noError(t, os.Symlink(self, binary))
	p := &program{cmd: exec.Command(binary, append(args, "-addr=127.0.0.1:0")...), ended: make(chan struct{})}
	p.cmd.Env = env
	said, err := p.cmd.StderrPipe()
	noError(t, err)
	noError(t, p.cmd.Start())
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // it may have ended
		<-p.ended
	})
	listening := make(chan struct{})
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(said); lines.Scan(); {
			t.Log(lines.Text())
			if found := curlLine.FindStringSubmatch(lines.Text()); found != nil {
				p.curl, p.url = lines.Text(), found[1]
				close(listening)
			}
		}
		p.err = p.cmd.Wait()
	}()
	select {
	case <-listening:
	case <-p.ended:
		t.Fatalf("it ended before it listened: %v", p.err)
	case <-time.After(testenv.Patience):
		t.Fatal("it does not listen")
	}
	return p
}

// order sends an order and returns its id.
func (p *program) order(t *testing.T) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.url, strings.NewReader(`{"cents": 4200}`))
	noError(t, err)
	r.Header.Set(idempotency.Header, string(idempotency.NewKey()))
	r.Header.Set("X-User-Id", "me")
	answer, err := http.DefaultClient.Do(r)
	noError(t, err)
	defer answer.Body.Close()
	var o order
	if err := json.NewDecoder(answer.Body).Decode(&o); err != nil || answer.StatusCode != http.StatusCreated || o.ID == "" {
		t.Fatalf("%s, %v: %+v", answer.Status, err, o)
	}
	return o.ID
}

// stop ends the program by a signal. It drains, and exits with 0.
func (p *program) stop(t *testing.T) {
	t.Helper()
	noError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case <-p.ended:
		if p.err != nil {
			t.Errorf("after SIGTERM: %v", p.err)
		}
	case <-time.After(testenv.Patience):
		t.Errorf("still there after %v", testenv.Patience)
	}
}

func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
