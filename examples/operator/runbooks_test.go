package operator_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/examples/operator"
)

var commandInText = regexp.MustCompile("`holdfast ([^`]+)`")

// What runbooks tell an operator to type is taken.
func TestRunbookCommands(t *testing.T) {
	t.Parallel()
	runbooks, err := filepath.Glob("observability/runbooks/*.md")
	if err != nil {
		t.Fatal(err)
	}
	commands := 0
	for _, runbook := range runbooks {
		text, err := os.ReadFile(runbook)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range commandInText.FindAllStringSubmatch(string(text), -1) {
			commands++
			o, err := operator.New(operator.Config{})
			if err != nil {
				t.Fatal(err)
			}
			args := strings.Fields(found[1])
			cmd, rest, err := o.Command().Find(args)
			if err == nil {
				err = cmd.ParseFlags(rest)
			}
			if err == nil {
				err = cmd.ValidateArgs(cmd.Flags().Args())
			}
			if err != nil || !cmd.Runnable() {
				t.Errorf("%s: %s: %v", runbook, found[0], err)
			}
		}
	}
	if commands == 0 {
		t.Error("the runbooks name no command")
	}
}
