package main

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net"

	"github.com/google/uuid"
)

// newID gives a UUID v7: ids sort by the time they were made.
func newID() string { return uuid.Must(uuid.NewV7()).String() }

// announce prints where the shop is, and three lines to paste into a shell.
func announce(w io.Writer, cfg config, addr net.Addr) {
	url := "http://" + addr.String()
	fmt.Fprintf(w, "reservation: listening on %s (backend %s, role %s)\n", url, cfg.backend, cfg.role)
	if cfg.role != roleAll && cfg.role != roleAPI {
		return
	}
	post := func(path, body string) string {
		line := fmt.Sprintf("curl -sS -X POST %s%s -H 'X-Mock-User-Id: ada' -H 'Idempotency-Key: %s'", url, path, newKey())
		if body != "" {
			line += " -H 'Content-Type: application/json' -d " + body
		}
		return line
	}
	// Each line shows the answer; the first two also keep the id in it, which comes first, for the next one.
	const keep = " | tee /dev/stderr | grep -oE '[0-9a-f-]{36}' | head -n1)"
	fmt.Fprintln(w, "Try these three lines, in this order:")
	fmt.Fprintln(w, "  EVENT=$("+post("/api/events", `'{"name":"Concert","seats":50}'`)+keep)
	fmt.Fprintln(w, "  HOLD=$("+post("/api/reservations", `"{\"event_id\":\"$EVENT\",\"quantity\":2}"`)+keep)
	fmt.Fprintln(w, "  "+post("/api/reservations/$HOLD/confirm", ""))
}

// newKey gives an idempotency key: a UUID v4 without hyphens.
func newKey() string {
	id := uuid.Must(uuid.NewRandomFromReader(rand.Reader))
	return hex.EncodeToString(id[:])
}
