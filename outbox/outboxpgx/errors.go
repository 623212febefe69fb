package outboxpgx

import "github.com/holdfast-go/holdfast/internal/pgcall"

// ErrIgnored is inside every error about a change of the Store's tables that Postgres accepted and did not make: a
// trigger, a rule or row-level security dropped it. Check names the cause.
var ErrIgnored = pgcall.ErrIgnored

const (
	lockNotAvailable = "55P03"
	uniqueViolation  = "23505"
	queryCanceled    = "57014"
)
