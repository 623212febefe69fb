package blame_test

import (
	"os"
	"testing"

	"github.com/google/uuid"

	"github.com/holdfast-go/holdfast/inbox/internal/blame"
	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

func TestSuspects(t *testing.T) {
	t.Parallel()
	var s blame.Suspects
	a, b := uuid.New(), uuid.New()
	if s.Has(a) {
		t.Error("suspected before it failed")
	}
	s.Suspect(a)
	if !s.Has(a) || s.Has(b) {
		t.Errorf("suspected: %v and %v", s.Has(a), s.Has(b))
	}
	if s.Strike(a) || s.Strike(b) {
		t.Error("guilty after one strike")
	}
	if !s.Struck(a) || s.Struck(uuid.New()) {
		t.Error("a strike is not remembered, or another's")
	}
	if !s.Strike(a) {
		t.Error("not guilty after two strikes")
	}
	s.Clear(a)
	if s.Has(a) || s.Strike(a) {
		t.Error("strikes of a message that went through are remembered")
	}
	if !s.Has(b) {
		t.Error("another one was cleared, too")
	}
}

// What other consumers finish is never cleared here.
func TestSuspectsAreBounded(t *testing.T) {
	t.Parallel()
	var s blame.Suspects
	first := uuid.New()
	s.Suspect(first)
	for range 5000 {
		s.Suspect(uuid.New())
	}
	if s.Has(first) {
		t.Error("5000 suspects are remembered")
	}
}
