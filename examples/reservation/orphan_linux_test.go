package main_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

const (
	// orphanVar has TestNoOrphans be the process that is killed.
	orphanVar = "RESERVATION_TEST_ORPHAN"
	shopLine  = "the shop is process "
)

// TestNoOrphans kills a process of tests while it has a shop running. The shop ends, too.
func TestNoOrphans(t *testing.T) {
	t.Parallel()
	if os.Getenv(orphanVar) != "" {
		shop := start(t, os.Environ())
		fmt.Printf("%s%d\n", shopLine, shop.cmd.Process.Pid)
		<-shop.ended
		return
	}
	tests := exec.Command(os.Args[0], "-test.run=^TestNoOrphans$")
	tests.Env = append(os.Environ(), orphanVar+"=1", "TMPDIR="+t.TempDir())
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	dieWithTests(tests)
	stdout, err := tests.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := tests.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = tests.Process.Kill() // it may have ended
		_ = tests.Wait()
	}()
	shop := 0
	for lines := bufio.NewScanner(stdout); shop == 0 && lines.Scan(); {
		if pid, ok := strings.CutPrefix(lines.Text(), shopLine); ok {
			if shop, err = strconv.Atoi(pid); err != nil {
				t.Fatal(err)
			}
		}
	}
	if shop == 0 {
		t.Fatal("no shop has started")
	}
	if err := tests.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, func() error {
		if err := running(shop); !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	})
}

// running returns os.ErrNotExist where a process has ended, even one that nobody waits for.
func running(pid int) error {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return err
	}
	if _, state, _ := strings.Cut(string(stat), ") "); strings.HasPrefix(state, "Z") {
		return os.ErrNotExist
	}
	return fmt.Errorf("process %d still runs", pid)
}
