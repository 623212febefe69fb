// Package sqlstate finds what Postgres said, whichever client has told it: pgx's errors and lib/pq's
// both have the method SQLState.
package sqlstate

import "errors"

// Reporter is an error with the code of the server.
type Reporter interface{ SQLState() string }

// Of returns the first SQLSTATE in err's tree, or "" if the server has said nothing.
func Of(err error) string {
	var answer interface {
		error
		Reporter
	}
	if errors.As(err, &answer) {
		return answer.SQLState()
	}
	return ""
}
