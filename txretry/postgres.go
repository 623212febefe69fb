package txretry

import (
	"context"
	"errors"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/txretry/internal/session"
)

// poolSource hands out the connections of a pool.
type poolSource struct{ pool *pgxpool.Pool }

func (s poolSource) Acquire(ctx context.Context) (session.Session, error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	return &pgSession{pooled: conn, conn: conn.Conn()}, nil
}

// pgSession runs one transaction on a pooled connection.
type pgSession struct {
	pooled *pgxpool.Conn
	conn   *pgx.Conn
	tx     pgx.Tx // nil before Begin
}

func (s *pgSession) Begin(ctx context.Context, spec session.Spec) (err error) {
	s.tx, err = s.conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: spec.SQL})
	return err
}

func (s *pgSession) Tx() pgx.Tx { return s.tx }

func (s *pgSession) State() session.State {
	if s.conn.IsClosed() {
		return session.Lost
	}
	if s.conn.PgConn().IsBusy() {
		return session.Busy
	}
	switch s.conn.PgConn().TxStatus() {
	case 'T':
		return session.Open
	case 'E':
		return session.Failed
	}
	return session.Idle
}

func (s *pgSession) Savepoint(ctx context.Context, id int) error {
	_, err := s.conn.Exec(ctx, "savepoint "+savepointName(id))
	return err
}

func (s *pgSession) Release(ctx context.Context, id int) error {
	_, err := s.conn.Exec(ctx, "release savepoint "+savepointName(id))
	return err
}

// RollbackTo also releases: a savepoint that stays costs every later reader of
// the rows a look at its subtransaction.
func (s *pgSession) RollbackTo(ctx context.Context, id int) error {
	name := savepointName(id)
	_, err := s.conn.Exec(ctx, "rollback to savepoint "+name+"; release savepoint "+name)
	return err
}

func savepointName(id int) string { return "holdfast_" + strconv.Itoa(id) }

// Commit believes only what the server said. Everything that is neither a
// command tag nor an error report of the server leaves the outcome open, also
// where pgconn.SafeToRetry says that nothing was sent.
func (s *pgSession) Commit(ctx context.Context, last []session.Statement) (session.Outcome, error) {
	tag, err := s.sendCommit(ctx, last)
	if err == nil {
		if tag.String() == "COMMIT" {
			return session.Committed, nil
		}
		return session.RolledBack, pgx.ErrTxCommitRollback
	}
	if s.refused(err) {
		return session.RolledBack, err
	}
	return session.Unknown, err
}

// sendCommit sends COMMIT by the extended protocol, alone or at the end of one
// pipeline. (pgx 5.9 to 5.12 misreports a connection cut during an
// argument-less Exec as closed before sending.)
func (s *pgSession) sendCommit(ctx context.Context, last []session.Statement) (pgconn.CommandTag, error) {
	if len(last) == 0 {
		rows, _ := s.conn.Query(ctx, "commit", pgx.QueryExecModeExec)
		rows.Close()
		return rows.CommandTag(), rows.Err()
	}
	var batch pgx.Batch
	for _, st := range last {
		batch.Queue(st.SQL, st.Args...)
	}
	var tag pgconn.CommandTag
	batch.Queue("commit").Exec(func(t pgconn.CommandTag) error {
		tag = t
		return nil
	})
	err := s.conn.SendBatch(ctx, &batch).Close()
	if tag.String() == "COMMIT" {
		return tag, nil
	}
	return tag, err
}

// refused reports whether err proves that the transaction did not commit.
func (s *pgSession) refused(err error) bool {
	if state := s.State(); state == session.Open || state == session.Failed {
		return true // in step with the server, which says that it is not over
	}
	var unsent pgx.ErrPreprocessingBatch
	if errors.As(err, &unsent) {
		return true
	}
	var answer *pgconn.PgError
	return errors.As(err, &answer) && !isFatal(answer) && answer.Code != "40003" && answer.Code != "08007"
}

func isFatal(e *pgconn.PgError) bool {
	severity := e.SeverityUnlocalized
	if severity == "" {
		severity = e.Severity
	}
	return severity == "FATAL" || severity == "PANIC"
}

func (s *pgSession) Rollback(ctx context.Context) error {
	if state := s.State(); s.tx == nil || state == session.Idle || state == session.Lost {
		return nil
	}
	return s.tx.Rollback(ctx)
}

// Close gives the connection back; the pool destroys one that is not idle.
func (s *pgSession) Close() { s.pooled.Release() }
