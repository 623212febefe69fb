package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/internal/testenv"
	"github.com/holdfast-go/holdfast/internal/testenv/amqptest"
	"github.com/holdfast-go/holdfast/internal/testenv/pgtest"
	"github.com/holdfast-go/holdfast/internal/testenv/redistest"
)

// TestMain runs the program instead of the tests if the binary has the program's name.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "signups" {
		main()
		return
	}
	os.Exit(testenv.Run(m))
}

var blocks = regexp.MustCompile("(?s)```([a-z]+)\n(.*?)```\n")

// TestGuide_isTheProgram compares the blocks of the guide with the files.
func TestGuide_isTheProgram(t *testing.T) {
	t.Parallel()
	text := must(os.ReadFile("../guides/first-service.md"))
	var code, others []string
	for _, block := range blocks.FindAllStringSubmatch(string(text), -1) {
		if block[1] == "go" {
			code = append(code, block[2])
		} else {
			others = append(others, block[2])
		}
	}
	_, program, _ := strings.Cut(string(must(os.ReadFile("main.go"))), "\npackage")
	tests := string(must(os.ReadFile("main_test.go")))
	if got := strings.Join(code, "\n"); got != "package"+program+"\n"+tests {
		t.Error("the Go code of first-service.md differs from main.go and main_test.go")
	}
	if got := strings.Join(others, "\n"); got != string(must(os.ReadFile("Dockerfile")))+"\n"+string(must(os.ReadFile("deployment.yaml"))) {
		t.Error("the deployment of first-service.md differs from Dockerfile and deployment.yaml")
	}
	if steps := strings.Count(string(text), "\n## "); steps != 10 {
		t.Errorf("%d steps, want 10", steps)
	}
}

// TestService_onEmptyServers follows step 8 with signups that expire at once.
func TestService_onEmptyServers(t *testing.T) {
	t.Parallel()
	database := pgtest.URL(t)
	address, stop := start(t, "DATABASE_URL="+database, "REDIS_URL="+redistest.URL(t), "AMQP_URL="+amqptest.New(t).URL)
	conn := must(pgx.Connect(t.Context(), database))
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })

	id := post(t, address+"/signups", http.StatusOK)
	eventually(t, func() error {
		var mails, created, expired int
		err := conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM mails), (SELECT coalesce(sum(n), 0) FROM tally WHERE event = 'created'),
			(SELECT coalesce(sum(n), 0) FROM tally WHERE event = 'expired')`).Scan(&mails, &created, &expired)
		if err == nil && (mails != 1 || created != 1 || expired != 1) {
			err = fmt.Errorf("%d mails, %d created, %d expired, want 1 of each", mails, created, expired)
		}
		return err
	})
	post(t, address+"/signups/"+id+"/confirm", http.StatusConflict)
	for _, path := range []string{"/readyz", "/operator/"} {
		eventually(t, func() error {
			answer, err := http.Get(address + path)
			if err != nil {
				return err
			}
			defer answer.Body.Close()
			if answer.StatusCode != http.StatusOK {
				return fmt.Errorf("%s: %s", path, answer.Status)
			}
			return nil
		})
	}
	stop()
}

func post(t *testing.T, address string, status int) string {
	t.Helper()
	answer := must(http.PostForm(address, url.Values{"email": {"ann@example.com"}}))
	defer answer.Body.Close()
	if answer.StatusCode != status {
		t.Fatalf("%s: %s, want %d", address, answer.Status, status)
	}
	return strings.TrimSpace(string(must(io.ReadAll(answer.Body))))
}

func eventually(t *testing.T, try func() error) {
	t.Helper()
	testenv.Eventually(t, try)
}

// start runs the program on a free port and returns its address; stop ends it by SIGTERM.
func start(t *testing.T, env ...string) (address string, stop func()) {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "signups")
	check(os.Symlink(must(os.Executable()), binary))
	cmd := exec.Command(binary, "-keep=0s", "-addr=127.0.0.1:0")
	cmd.Env = append(os.Environ(), env...)
	log := must(cmd.StderrPipe())
	check(cmd.Start())
	listening, ended := make(chan string, 1), make(chan error, 1)
	go func() {
		for lines := bufio.NewScanner(log); lines.Scan(); {
			t.Log(lines.Text())
			if _, found, ok := strings.Cut(lines.Text(), "listening on "); ok {
				listening <- "http://" + found
			}
		}
		ended <- cmd.Wait()
	}()
	done := false
	t.Cleanup(func() {
		if !done {
			_ = cmd.Process.Kill() // it may have ended
			_ = <-ended            // it was killed
		}
	})
	select {
	case address = <-listening:
	case <-time.After(testenv.Patience):
		t.Fatal("it does not listen")
	}
	return address, func() {
		check(cmd.Process.Signal(syscall.SIGTERM))
		err := <-ended
		done = true
		if err != nil {
			t.Errorf("after SIGTERM: %v", err)
		}
	}
}

func TestConfirm_keepsSignup(t *testing.T) {
	t.Parallel()
	_, a := newSchema(t)
	w := httptest.NewRecorder()
	a.create(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/signups", nil))
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	r.SetPathValue("id", strings.TrimSpace(w.Body.String()))
	for _, want := range []int{http.StatusOK, http.StatusConflict} {
		w := httptest.NewRecorder()
		if a.confirm(w, r); w.Code != want {
			t.Errorf("status %d, want %d", w.Code, want)
		}
	}
}

func TestCreate_writesRowAndMessage(t *testing.T) {
	pool, a := newSchema(t)
	form := strings.NewReader(url.Values{"email": {"ann@example.com"}}.Encode())
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/signups", form)
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	a.create(httptest.NewRecorder(), r)
	var rows, messages int
	const query = "SELECT (SELECT count(*) FROM signups), (SELECT count(*) FROM holdfast_outbox)"
	check(pool.QueryRow(t.Context(), query).Scan(&rows, &messages))
	if rows != 1 || messages != 1 {
		t.Errorf("%d rows, %d messages, want 1 of each", rows, messages)
	}
}

func TestSweep_expiresOpenSignups(t *testing.T) {
	pool, a := newSchema(t)
	must(pool.Exec(t.Context(), "INSERT INTO signups VALUES (gen_random_uuid(), 'a@b', 'open', now()), (gen_random_uuid(), 'c@d', 'confirmed', now())"))
	report, err := must(expiry.NewSweeper(a.signups, expiry.SweeperConfig{})).Sweep(context.WithoutCancel(t.Context()))
	if err != nil || report.Expired != 1 {
		t.Errorf("%d expired, %v, want 1", report.Expired, err)
	}
}
