package main

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"

	"github.com/google/uuid"
)

// newID gives a UUID v7: ids sort by the time they were made.
func newID() string { return uuid.Must(uuid.NewV7()).String() }

// printTrial prints three lines to paste into a shell.
func printTrial(w io.Writer, url string) {
	// An answer begins with {"id":" and the 36 characters of the id, which the next line takes out of it.
	const line1 = `EVENT=$(curl -sS %s/api/events -d '{"name":"Concert","seats":50}' %s); echo "$EVENT"`
	const line2 = `HOLD=$(curl -sS %s/api/reservations -d '{"event_id":"'${EVENT:7:36}'","quantity":2}' %s); echo "$HOLD"`
	const line3 = `curl -i %s/api/reservations/${HOLD:7:36}/confirm -d '{}' %s`
	fmt.Fprintln(w, "Try these three lines in bash or zsh, in this order:")
	for _, line := range []string{line1, line2, line3} {
		headers := "-H X-Mock-User-Id:ada -H Idempotency-Key:" + newKey() + " -H Content-Type:application/json"
		fmt.Fprintf(w, "  "+line+"\n", url, headers)
	}
}

// newKey gives an idempotency key: a UUID v4 without hyphens.
func newKey() string {
	id := uuid.Must(uuid.NewRandomFromReader(rand.Reader))
	return hex.EncodeToString(id[:])
}
