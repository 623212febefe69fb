package inboxpgx

import (
	"github.com/holdfast-go/holdfast/internal/migrate"
	"github.com/holdfast-go/holdfast/internal/sqlident"
)

// Grants returns what a role of the database needs for one job and no more, each the text between GRANT
// and TO. The job "consume" is that of a consumer, beside what its handlers do; "operate" is Check,
// Prune, Pause, and the dead letters of keys that wait. Of another job it is nil, and with Config.Entries too.
func (s *Store) Grants(job string) []string {
	if s.table == nil {
		return nil
	}
	t := s.table.names
	noted := migrate.Grant(t.schema) // so that Migrate finds that nothing is to be done
	switch job {
	case "consume":
		return sqlident.Granted(t.schema, append(noted,
			`SELECT, INSERT (consumer, message_id), UPDATE (processed_at), DELETE ON `+t.entries,
			`SELECT, INSERT, UPDATE, DELETE ON `+t.attempts,
			`SELECT, INSERT (consumer, key), UPDATE (since, next_at), DELETE ON `+t.stopped,
			`SELECT, INSERT, UPDATE, DELETE ON `+t.waiting,
			`SELECT ON `+t.pause)...)
	case "operate":
		return sqlident.Granted(t.schema, append(noted,
			`SELECT, UPDATE (processed_at), DELETE ON `+t.entries,
			`SELECT, UPDATE (name), DELETE ON `+t.attempts,
			`SELECT, UPDATE (next_at) ON `+t.stopped,
			`SELECT, UPDATE, DELETE ON `+t.waiting,
			`SELECT, INSERT (part, actor, reason), UPDATE (actor, reason), DELETE ON `+t.pause)...)
	}
	return nil
}
