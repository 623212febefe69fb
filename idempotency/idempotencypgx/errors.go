package idempotencypgx

import "github.com/holdfast-go/holdfast/internal/pgcall"

// ErrIgnored is inside every error about a change of the Store's table that Postgres accepted and did not make: a
// trigger, a rule or a row-level-security policy dropped it. A transaction whose record was dropped is rolled back. Check
// names the cause.
var ErrIgnored = pgcall.ErrIgnored
