package inboxpgx

import "github.com/holdfast-go/holdfast/internal/pgcall"

// ErrIgnored is inside every error about a change of the Store's tables that Postgres accepted and did not make: a
// trigger, a rule or a row-level-security policy dropped it. The message in question is not done. The consumer holds
// messages back as in an outage, and Check names the cause.
var ErrIgnored = pgcall.ErrIgnored
