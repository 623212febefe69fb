package driver

// AskFate is the statement of Source.Fate on Postgres: its argument is the id, and FateOf reads the first
// column. It also ends the transaction if the server still waits for its client, which has gone. A
// transaction that is committing goes on.
const AskFate = `select pg_xact_status(x), (
		select bool_or(pg_terminate_backend(pid)) from pg_stat_activity
		where backend_xid = x::xid and state like 'idle in transaction%' and usename = current_user
	) from (select $1::text::xid8) as asked(x)`

// FateOf reads the answer to AskFate: pg_xact_status does not know an id of the future, as after a failover
// (22023), or one whose log is gone (NULL). sqlstate is that of err.
func FateOf(status *string, sqlstate string, err error) (Outcome, error) {
	switch {
	case sqlstate == "22023", err == nil && status == nil:
		return Unknown, ErrForgotten
	case err != nil:
		return Unknown, err
	case *status == "committed":
		return Committed, nil
	case *status == "aborted":
		return RolledBack, nil
	}
	return Unknown, nil
}
