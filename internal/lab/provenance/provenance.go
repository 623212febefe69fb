// Package provenance tells where the figures of a report come from.
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

// Head is the line of a report that says what wrote it, when, of which commit and where. It is to be made when the run
// begins: the commit may be another one at the end.
func Head(command string, began time.Time) string {
	return fmt.Sprintf("Written by `%s`, begun %s UTC, commit %s, on %s.", command, began.UTC().Format("2006-01-02 15:04"), Commit(), Machine())
}

// Machine describes what this runs on.
func Machine() string {
	text := fmt.Sprintf("%d cores, %s/%s, %s", runtime.NumCPU(), runtime.GOOS, runtime.GOARCH, runtime.Version())
	if model := processor(); model != "" {
		return model + ", " + text
	}
	return text
}

// processor is its model where Linux tells it.
func processor() string {
	data, _ := os.ReadFile("/proc/cpuinfo") // without it the model is not told
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		if name, value, _ := strings.Cut(lines.Text(), ":"); strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Commit names the one that is checked out, "unknown" where there is no history.
func Commit() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}
