package browser_test

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// buildDir holds the shop while the tests run.
var buildDir string

func TestMain(m *testing.M) {
	var err error
	if buildDir, err = os.MkdirTemp("", "shop"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := testenv.Run(m)
	_ = os.RemoveAll(buildDir)
	os.Exit(code)
}

// buildShop builds the shop, once.
var buildShop = sync.OnceValues(func() (string, error) {
	path := filepath.Join(buildDir, "reservation")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-o", path, ".")
	cmd.Dir = "../../../examples/reservation"
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// startShop runs a shop in memory until the test ends, and returns its address.
func startShop(t testing.TB, flags ...string) (url string) {
	t.Helper()
	path, err := buildShop()
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	cmd := exec.Command(path, append([]string{"-addr=127.0.0.1:0"}, flags...)...)
	cmd.Stderr = &log
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	listening, ended := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(ended)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			if _, after, ok := strings.Cut(lines.Text(), "listening on "); ok {
				address, _, _ := strings.Cut(after, " ")
				listening <- address
			}
		}
		_ = cmd.Wait() // it is killed
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Logf("the shop said:\n%s", log.String())
		}
	})
	select {
	case url = <-listening:
		return url
	case <-ended:
		t.Fatal("the shop ended before it listened")
	case <-time.After(testenv.Patience):
		t.Fatal("the shop does not listen")
	}
	return ""
}
