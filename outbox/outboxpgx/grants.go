package outboxpgx

import (
	"strings"

	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// Grants returns what a role of the database needs for one job and no more, each the text between GRANT
// and TO. The jobs are "write" (Write, WriteOnce and the function that writes), "relay" (a relay and what
// it prunes) and "operate" (DeadLetters, Waiting, Depth, Pause, Audit and Prune). Of another job it is nil.
//
// A row is locked by whoever may change a column of it: where a job locks rows that it must not change,
// it may change a column that nothing reads, or that the server fills.
func (s *Store) Grants(job string) []string {
	t := s.t
	noted := migrate.Grant(s.cfg.Schema) // so that Migrate finds that nothing is to be done
	// Pruning is part of two jobs.
	prunes := append(noted,
		`SELECT (id, at), UPDATE (id), DELETE ON `+t.audit,
		`SELECT (key, expires_at), UPDATE (expires_at), DELETE ON `+t.dedup)
	// What is buried again replaces all of a letter but its id, which the server counts as reading it.
	const letter = columns + `, seq, created_at, attempts, error_class, last_error`
	again := strings.TrimPrefix(letter, "id, ") + ", died_at"
	switch job {
	case "write":
		return sqlident.Granted(s.cfg.Schema, append(noted,
			`INSERT (`+columns+`, due_at) ON `+t.outbox,
			`SELECT (key, id, expires_at), INSERT (key, id, expires_at), UPDATE (id, expires_at) ON `+t.dedup,
			`EXECUTE ON FUNCTION `+t.write+`, `+t.ignored)...)
	case "relay":
		return sqlident.Granted(s.cfg.Schema, append(prunes,
			`SELECT, UPDATE (published_at, due_at, held, attempts, error_class, last_error), DELETE ON `+t.outbox,
			`SELECT, UPDATE (token, lease_until, floor, batch, suspect, alone, losses, era) ON `+t.lanes,
			`SELECT ON `+t.pause,
			`SELECT, INSERT (`+letter+`), UPDATE (`+again+`) ON `+t.dead,
			`EXECUTE ON FUNCTION `+t.claim+`, `+t.settle+`, `+t.record+`, `+t.look+`, `+t.ignored)...)
	case "operate":
		return sqlident.Granted(s.cfg.Schema, append(prunes,
			`SELECT, INSERT (`+columns+`, created_at, due_at), UPDATE (held), DELETE ON `+t.outbox,
			`SELECT ON `+t.lanes,
			`SELECT ON SEQUENCE `+t.sequence,
			`SELECT, UPDATE (fingerprint), DELETE ON `+t.dead,
			`SELECT, INSERT (part, actor, reason), UPDATE (actor, reason), DELETE ON `+t.pause,
			`SELECT, INSERT (actor, reason, action, count, filter), UPDATE (count) ON `+t.audit,
			`EXECUTE ON FUNCTION `+t.ignored)...)
	}
	return nil
}
