// Package provenance describes the origin of the figures in a report.
package provenance

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// Head returns the first line of a report: the command, its start, the commit and the machine. Call it when the run
// starts, because the commit may have changed at the end.
func Head(command string, began time.Time) string {
	return fmt.Sprintf("Written by `%s`, started %s UTC, commit %s, on %s.", command, began.UTC().Format("2006-01-02 15:04"), Commit(), Machine())
}

// Machine describes this machine.
func Machine() string {
	text := fmt.Sprintf("%d cores, %s/%s, %s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, runtime.Version())
	if model := processor(); model != "" {
		return model + ", " + text
	}
	return text
}

// processor returns the processor's model, if Linux reports it.
func processor() string {
	data, _ := os.ReadFile("/proc/cpuinfo") // without the file the model is left out
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		if name, value, _ := strings.Cut(lines.Text(), ":"); strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Commit returns the current commit, "unknown" without a history.
func Commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}
