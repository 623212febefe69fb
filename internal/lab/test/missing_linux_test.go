package main

import (
	"errors"
	"strings"
	"testing"
)

func TestNoProc(t *testing.T) {
	t.Parallel()
	err := checkProc(t.TempDir())
	if !errors.Is(err, errUnusable) || !strings.Contains(err.Error(), "a mounted") {
		t.Errorf("without /proc: %v", err)
	}
	if err := checkProc("/proc"); err != nil {
		t.Error(err)
	}
}

// Only here the environment says where the certificates are.
func TestNoCertificates(t *testing.T) {
	t.Parallel()
	const failedDownload = `[ "$1" != list ] || exit 1`
	output, code := program(t, t.TempDir(), failedDownload, "SSL_CERT_FILE=/dev/null", "SSL_CERT_DIR=/dev/null")
	if code != exitUnusable || !strings.Contains(output, "install ca-certificates") {
		t.Errorf("exit code %d, output:\n%s", code, output)
	}
}
