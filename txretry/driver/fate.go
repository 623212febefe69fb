package driver

import "time"

// AskFate is the statement of Source.Fate on Postgres: its arguments are the id and AgeOf the transaction,
// and FateOf reads the first column. It also ends the transaction if the server still waits for its client,
// which has gone. A transaction that is committing goes on.
//
// A server that has crashed meanwhile gives an id of which it had written nothing to its disk to another
// transaction. It is known by its statistics, which begin anew when it recovers, and go on when it is
// restarted in order: after a crash the statement answers NULL and ends no transaction.
const AskFate = `select case when not crashed then pg_xact_status(x) end, (
		select bool_or(pg_terminate_backend(pid)) from pg_stat_activity
		where not crashed and backend_xid = x::xid and state like 'idle in transaction%' and usename = current_user
	) from (select $1::text::xid8, coalesce(stats_reset > clock_timestamp() - make_interval(secs => $2::float8), true)
		from pg_stat_bgwriter) as asked(x, crashed)`

// ageMargin is how much the server's clock may gain on that of the client meanwhile.
const ageMargin = time.Second

// AgeOf returns within how many seconds before now a transaction began, by the client's own clock.
func AgeOf(begun time.Time) float64 { return (time.Since(begun) + ageMargin).Seconds() }

// FateOf reads the answer to AskFate: pg_xact_status does not know an id of the future, as after a failover
// (22023), or one whose log is gone (NULL), and is not asked after a crash (NULL). sqlstate is that of err.
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
