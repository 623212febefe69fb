package testenv_test

import (
	"fmt"
	"os/exec"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// A shell's own work counts, that of a child that runs, and that of one that has ended.
func TestCPUTimeCountsChildren(t *testing.T) {
	t.Parallel()
	for name, script := range map[string]string{
		"own":     "while :; do :; done",
		"running": "sh -c 'while :; do :; done'; :",
		"ended":   "i=0; sh -c 'i=0; while [ $i -lt 2000000 ]; do i=$((i+1)); done'; sleep 60",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command("sh", "-c", script)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = testenv.EndTree(cmd.Process.Pid, 9, 0)
				_ = cmd.Wait()
			}()
			testenv.Eventually(t, func() error {
				used, err := testenv.CPUTime(cmd.Process.Pid)
				if err == nil && used < 100*time.Millisecond {
					err = fmt.Errorf("%v", used)
				}
				return err
			})
		})
	}
	if _, err := testenv.CPUTime(1 << 30); err == nil {
		t.Error("a process that does not exist has used no time, want an error")
	}
}
