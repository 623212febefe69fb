package driver

import "github.com/jackc/pgx/v5"

// StateOf returns what is known of the transaction of tx, a handle of a manager. Of any other, and of a
// handle that is over, it is Open: nothing is known.
func StateOf(tx pgx.Tx) State {
	state := Open
	if h, ok := tx.(interface {
		Statement(run func(s Session) error) error
	}); ok {
		_ = h.Statement(func(s Session) error { // its error says that the handle is over
			state = s.State()
			return nil
		})
	}
	return state
}
