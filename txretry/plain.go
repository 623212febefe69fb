package txretry

import (
	"strings"

	"github.com/jackc/pgx/v5"
)

// plainVerbs begin the statements that read and write rows. None of them can set or end a savepoint.
var plainVerbs = map[string]bool{
	"select": true, "insert": true, "update": true, "delete": true, "merge": true, "with": true, "values": true, "table": true,
}

// isPlain reports whether the text is certainly one statement that reads or writes rows. What is not
// recognised is not plain, and costs a round trip at most: the name of a prepared statement, a text with
// a semicolon in it, a rewriter of the user, or a query that changes a setting.
func isPlain(sql string, args []any) bool {
	if !plainArgs(args) {
		return false
	}
	sql = strings.TrimRight(withoutComments(sql), "; \t\r\n\f\v")
	end := strings.IndexFunc(sql, func(r rune) bool { return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') })
	if end < 0 || !strings.ContainsRune(" \t\r\n\f*('", rune(sql[end])) || !plainVerbs[strings.ToLower(sql[:end])] {
		return false
	}
	return strings.IndexByte(sql, ';') < 0 && !containsFold(sql, "set_config") && !containsFold(sql, "pg_settings")
}

func isPlainBatch(b *pgx.Batch) bool {
	for _, q := range b.QueuedQueries {
		if !isPlain(q.SQL, q.Arguments) {
			return false
		}
	}
	return true
}

// plainArgs reports whether no argument can change the text.
func plainArgs(args []any) bool {
	for _, arg := range args {
		switch arg.(type) {
		case pgx.NamedArgs, pgx.StrictNamedArgs:
		case pgx.QueryRewriter:
			return false
		}
	}
	return true
}

// withoutComments returns the text from its first word on, or "" where a comment does not end. Comments
// of Postgres nest.
func withoutComments(sql string) string {
	for {
		sql = strings.TrimLeft(sql, " \t\r\n\f\v")
		switch {
		case strings.HasPrefix(sql, "--"):
			end := strings.IndexAny(sql, "\r\n")
			if end < 0 {
				return ""
			}
			sql = sql[end:]
		case strings.HasPrefix(sql, "/*"):
			end := commentEnd(sql)
			if end < 0 {
				return ""
			}
			sql = sql[end:]
		default:
			return sql
		}
	}
}

// commentEnd returns where the comment at the beginning ends, or -1.
func commentEnd(sql string) int {
	depth := 0
	for i := 0; i+1 < len(sql); i++ {
		switch sql[i : i+2] {
		case "/*":
			depth++
			i++
		case "*/":
			depth--
			i++
			if depth == 0 {
				return i + 1
			}
		}
	}
	return -1
}

// containsFold reports whether sql contains the word, in letters of either case.
func containsFold(sql, word string) bool {
	for i := 0; i+len(word) <= len(sql); i++ {
		if sql[i]|0x20 == word[0] && strings.EqualFold(sql[i:i+len(word)], word) {
			return true
		}
	}
	return false
}
