package shop

import (
	"errors"
	"testing"
)

func TestBinaryOfNoCommit(t *testing.T) {
	if path, err := BinaryOf(t.Context(), "0123456789abcdef0123456789abcdef01234567"); !errors.Is(err, ErrNoCommit) {
		t.Errorf("%s (%v), want ErrNoCommit", path, err)
	}
}
