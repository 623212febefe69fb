package main

import (
	"context"
	"fmt"
	"os"

	"github.com/holdfast-go/holdfast/internal/lab/apt"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

// getTools installs the servers that are missing, and libfaketime, where it can. Without libfaketime the clocks are left
// alone, and the report says so.
func getTools(ctx context.Context) error {
	if fakeTime() == "" && apt.CanInstall() {
		if err := apt.Install(ctx, "libfaketime"); err != nil {
			fmt.Fprintln(os.Stderr, "chaos: no libfaketime:", err)
		}
	}
	if missing := testenv.ServersMissing(); len(missing) > 0 && apt.CanInstall() {
		return apt.Install(ctx, missing...)
	}
	return nil
}
