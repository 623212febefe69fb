package main

import (
	"slices"
	"testing"
)

func TestInMemory(t *testing.T) {
	t.Setenv("TMPDIR", "")
	for _, dir := range []string{"/proc", "/dev/shm/missing", t.TempDir()} {
		if env := inMemory(dir); env != nil {
			t.Errorf("%s: %v", dir, env)
		}
	}
	t.Setenv("TMPDIR", "/elsewhere")
	if env := inMemory("/dev/shm"); slices.Contains(env, "TMPDIR=/dev/shm") {
		t.Errorf("TMPDIR was set: %v", env)
	}
}
