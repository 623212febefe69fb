package wire_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/internal/wire"
)

type foreign struct{}

func (foreign) Form() string { return "symfony" }

func TestFormOfSomebodyElseIsRefused(t *testing.T) {
	t.Parallel()
	if _, err := wire.NewForm(foreign{}); err == nil {
		t.Error("a format was taken that nobody here knows")
	}
}
