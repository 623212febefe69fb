package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/idempotency"
)

// shopBinary builds the shop, once.
var shopBinary = sync.OnceValues(func() (string, error) {
	path := filepath.Join(buildDir, "reservation")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", path, ".")
	build.Dir = "../../../examples/reservation"
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// shop is the example as a process.
type shop struct {
	url  string
	kill func()
}

// startShop runs the shop until the test ends.
func startShop(t *testing.T, env []string, args ...string) shop {
	t.Helper()
	binary, err := shopBinary()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	cmd := exec.Command(binary, append([]string{"-addr=127.0.0.1:0", "-hold=1s", "-sweep=@every 1s", "-user-limit=20"}, args...)...)
	cmd.Env, cmd.Stderr = append(os.Environ(), env...), &said
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	kill := sync.OnceFunc(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
	})
	t.Cleanup(func() {
		kill()
		if t.Failed() {
			t.Logf("the shop said:\n%s", &said)
		}
	})
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		if _, after, ok := strings.Cut(lines.Text(), "listening on "); ok {
			address, _, _ := strings.Cut(after, " ")
			go func() { _, _ = io.Copy(io.Discard, stdout) }()
			return shop{address, kill}
		}
	}
	t.Fatal("the shop does not listen")
	return shop{}
}

// load has users hold seats, each request twice, until ctx ends. What they do not confirm expires.
func load(ctx context.Context, address string) {
	client := &http.Client{Timeout: time.Minute}
	defer client.CloseIdleConnections()
	post := func(user, path, body string) (answer []byte) {
		key := string(idempotency.NewKey())
		for range 2 {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, address+path, strings.NewReader(body))
			if err != nil {
				return nil
			}
			req.Header.Set("X-Mock-User-Id", user)
			req.Header.Set("Idempotency-Key", key)
			req.Header.Set("Content-Type", "application/json")
			resp, err := client.Do(req)
			if err != nil {
				return nil
			}
			answer, _ = io.ReadAll(resp.Body) // half an answer is none
			_ = resp.Body.Close()
		}
		return answer
	}
	rest := func() {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	for user := 0; ctx.Err() == nil; user++ {
		rest()
		var event struct{ ID string }
		name := fmt.Sprint("user-", user)
		if json.Unmarshal(post(name, "/api/events", `{"name":"Concert","seats":50}`), &event) != nil {
			continue
		}
		for range 15 {
			post(name, "/api/reservations", `{"event_id":"`+event.ID+`","quantity":1}`)
			rest()
		}
	}
}
