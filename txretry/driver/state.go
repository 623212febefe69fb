package driver

import "github.com/jackc/pgx/v5"

// StateOf returns what is known of the transaction of tx: of a handle of a manager, or of a pgx.Tx with a
// connection. Of any other, and of a handle that is over, it is Open: nothing is known. Unlike Conn of a
// handle it gives nothing away.
func StateOf(tx pgx.Tx) State {
	state := Open
	if h, ok := tx.(interface {
		Statement(run func(s Session) error) error
	}); ok {
		_ = h.Statement(func(s Session) error { // its error says that the handle is over
			state = s.State()
			return nil
		})
		return state
	}
	conn := tx.Conn()
	switch {
	case conn == nil:
		return Open
	case conn.IsClosed():
		return Lost
	}
	switch conn.PgConn().TxStatus() {
	case 'I':
		return Idle
	case 'E':
		return Failed
	}
	return Open
}
