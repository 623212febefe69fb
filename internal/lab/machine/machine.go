// Package machine says what a report was made on.
package machine

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strings"
)

// Describe names the processor, the cores, the system and the version of Go.
func Describe() string {
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
