// Package shop runs the reservation example as processes, for tests and commands of other packages. They call Remove
// at their end.
package shop

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
)

const example = "github.com/holdfast-go/holdfast/examples/reservation"

// dir holds the binary.
var dir = filepath.Join(os.TempDir(), fmt.Sprintf("holdfast-shop-%d", os.Getpid()))

// Binary builds the shop, once in a process, and returns its path.
var Binary = sync.OnceValues(func() (string, error) {
	path := filepath.Join(dir, "reservation")
	if out, err := exec.Command("go", "build", "-buildvcs=false", "-o", path, example).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// Remove removes the binary, if one was built.
func Remove() { _ = os.RemoveAll(dir) }
