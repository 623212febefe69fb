package check_test

import (
	"errors"
	"os"
	"testing"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestFindings(t *testing.T) {
	t.Parallel()
	found := check.Findings{Component: "outboxpgx"}
	if err := found.Err(); err != nil {
		t.Errorf("nothing was found: %v", err)
	}
	failure := errors.New("outboxpgx: check: no connection")
	found.Add("call Migrate", "table %s does not exist", "holdfast_outbox")
	found.Join(nil)
	found.Join(failure)
	err := found.Err()
	if want := "outboxpgx: table holdfast_outbox does not exist; call Migrate\n" + failure.Error(); err == nil || err.Error() != want {
		t.Fatalf("error %q, want %q", err, want)
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok || len(joined.Unwrap()) != 2 {
		t.Fatalf("%#v does not give its two errors singly", err)
	}
	for i, fix := range []string{"call Migrate", ""} {
		single := joined.Unwrap()[i]
		finding, ok := single.(interface{ Fix() string })
		if ok != (fix != "") || ok && finding.Fix() != fix {
			t.Errorf("%q: a finding is %t, want fix %q", single, ok, fix)
		}
	}
}
