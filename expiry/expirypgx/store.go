package expirypgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/expiry"
	"github.com/holdfast-go/holdfast/expiry/driver"
	"github.com/holdfast-go/holdfast/expiry/internal/blame"
	"github.com/holdfast-go/holdfast/expiry/internal/wakeups"
	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgcheck"
	"github.com/holdfast-go/holdfast/internal/pgnotify"
	"github.com/holdfast-go/holdfast/internal/sqlident"
	"github.com/holdfast-go/holdfast/txretry"
	txdriver "github.com/holdfast-go/holdfast/txretry/driver"
)

// Store is a Postgres table whose rows expire. Make it with New. It is safe for concurrent use.
//
// SweepBatch, Look, Fit and Background are for expiry.Sweeper.
type Store struct {
	transactor txretry.Transactor
	pool       *pgxpool.Pool
	name       string // name of the table, without its schema
	cfg        Config
	sql        statements

	sweepers  wakeups.List // the sweepers of this process
	sender    *pgnotify.Sender
	listener  *pgnotify.Listener
	listening chan struct{} // held by the sweeper that listens
}

// New returns a Store on your table. Batches run in transactions of t, a *txretry.Manager, which retries conflicts.
// Everything else uses t's pool. New does not contact the server.
func New(t txretry.Transactor, table string, cfg Config) (*Store, error) {
	var errs []error
	pool := poolOf(t)
	if pool == nil {
		errs = append(errs, errors.New("expirypgx: the transactor has no pool: pass a *txretry.Manager with a pool"))
	}
	if err := sqlident.Check(table); err != nil {
		errs = append(errs, fmt.Errorf("expirypgx: table: %w", err))
	}
	cfg = cfg.withDefaults()
	if err := errors.Join(append(errs, cfg.validate())...); err != nil {
		return nil, err
	}
	sql, err := newStatements(table, cfg)
	if err != nil {
		return nil, fmt.Errorf("expirypgx: %w", err)
	}
	qualified, err := sqlident.Qualify(cfg.Schema, table)
	if err != nil {
		return nil, fmt.Errorf("expirypgx: %w", err)
	}
	s := &Store{transactor: t, pool: pool, name: table, cfg: cfg, sql: sql}
	s.connect(qualified)
	return s, nil
}

func poolOf(t txretry.Transactor) *pgxpool.Pool {
	if pooler, ok := t.(txdriver.Pooler); ok {
		return pooler.Pool()
	}
	return nil
}

// SweepBatch implements expiry/driver.Store.
func (s *Store) SweepBatch(ctx context.Context, req driver.Request) (driver.Batch, error) {
	if req.Limit < 1 {
		return driver.Batch{}, fmt.Errorf("expirypgx: Request.Limit is %d, must be positive", req.Limit)
	}
	var a attempt
	opts := txretry.Options{Name: "expiry.sweep", Isolation: s.cfg.Isolation, CommitTimeout: commitTimeout, IdleTimeout: idleTimeout(ctx)}
	err := s.transactor.DoWith(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
		a = attempt{} // drop the state of an earlier attempt
		return s.attempt(ctx, tx, req, &a)
	})
	if err != nil {
		return driver.Batch{}, a.failure(ctx, err, s.worded)
	}
	return a.batch, nil
}

// commitTimeout limits the wait for the answer to COMMIT. A sweep may run again whatever the outcome is.
const commitTimeout = 4 * time.Second

// idleTimeout makes the server release the locks of a batch with a silent connection as soon as this process gives up
// the batch. 0 means the manager's value.
func idleTimeout(ctx context.Context) time.Duration {
	deadline, ok := ctx.Deadline()
	if !ok {
		return 0
	}
	return max(time.Second, time.Until(deadline).Round(time.Second)) // rounded, so that there are few different values
}

// attempt is the state of the last attempt of the transaction.
type attempt struct {
	blame.Attempt
	batch driver.Batch
}

func (a attempt) failure(ctx context.Context, err error, worded func(error) error) error {
	a.Last = a.batch.Last
	var unknown *txretry.CommitUnknownError
	if blamed := a.Failure(ctx, err, errors.As(err, &unknown)); blamed != nil {
		return blamed
	}
	return fmt.Errorf("expirypgx: sweep: %w", worded(err))
}

// worded adds the fix to the error of a missing table or column.
func (s *Store) worded(err error) error {
	missing, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || missing.Code != undefinedTable && missing.Code != undefinedColumn {
		return err
	}
	return fmt.Errorf("table %s or one of its columns does not exist: create it, or fix Config: %w", s.table(), err)
}

const (
	undefinedTable  = "42P01"
	undefinedColumn = "42703"
)

func (s *Store) attempt(ctx context.Context, tx pgx.Tx, req driver.Request, a *attempt) error {
	rows, err := s.claim(ctx, tx, req, &a.batch)
	if err != nil || len(rows) == 0 {
		return err
	}
	for _, row := range rows {
		a.Rows = append(a.Rows, row.ID)
	}
	changed, still, err := s.expire(ctx, tx, a.Rows)
	if err != nil {
		return err
	}
	if changed != len(rows) || still > 0 {
		a.Own = fmt.Errorf("expirypgx: of %d rows %d have changed and %d are due again (is Config.ID unique?): %w",
			len(rows), changed, still, pgcall.Ignored(s.table(), "the new status"))
		return a.Own
	}
	if err := s.emit(ctx, tx, rows); err != nil {
		err = fmt.Errorf("expirypgx: emit: %w", err) // comparable, whatever it wraps
		if txdriver.StateOf(tx) != txdriver.Lost {
			a.Own = err
		}
		return err
	}
	return nil
}

func (s *Store) emit(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
	if s.cfg.Emit == nil {
		return nil
	}
	return guarded("Emit", func() error { return s.cfg.Emit(ctx, tx, rows) })
}

// ErrIgnored is in the error of a batch whose rows are locked, active and due but do not all change, once each: a
// trigger, a rule or row-level security of the table drops the change or undoes it. Otherwise such rows would come
// back in every batch, or expire unannounced. Check names the cause.
var ErrIgnored = pgcall.ErrIgnored

// expire changes the status of rows. It returns the number of changed rows, and the number of rows that are still
// due, because a trigger may undo the change afterwards.
func (s *Store) expire(ctx context.Context, tx pgx.Tx, ids []string) (changed, still int, err error) {
	queue := &pgx.Batch{}
	queue.Queue(s.sql.expire, array(ids)).QueryRow(func(row pgx.Row) error { return row.Scan(&changed) })
	queue.Queue(s.sql.still, array(ids)).QueryRow(func(row pgx.Row) error { return row.Scan(&still) })
	return changed, still, tx.SendBatch(ctx, queue).Close()
}

// claim locks the due rows, longest overdue first, and records in b what it got.
func (s *Store) claim(ctx context.Context, tx pgx.Tx, req driver.Request, b *driver.Batch) ([]expiry.Row, error) {
	result, err := s.due(ctx, tx, req)
	if err != nil {
		return nil, err
	}
	rows := make([]expiry.Row, 0, min(req.Limit, typicalBatch))
	var in incoming
	_, err = pgx.ForEachRow(result, in.columns(len(s.cfg.Columns)), func() error {
		row := in.row(s.cfg.Columns)
		if !row.Deadline.IsZero() {
			b.Lag = max(b.Lag, in.now.Sub(row.Deadline))
		}
		rows = append(rows, row)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if n := len(rows); n > 0 {
		b.Claimed, b.Expired = n, n
		b.Last = driver.Cursor{Deadline: rows[n-1].Deadline, ID: rows[n-1].ID}
	}
	return rows, nil
}

// typicalBatch is the number of rows for which a batch allocates memory in advance.
const typicalBatch = 200

// due selects the rows of a batch.
func (s *Store) due(ctx context.Context, tx pgx.Tx, req driver.Request) (pgx.Rows, error) {
	switch {
	case len(req.Only) > 0:
		only := slices.DeleteFunc(slices.Clone(req.Only), func(id string) bool { return slices.Contains(req.Skip, id) })
		return tx.Query(ctx, limited(s.sql.claimOnly, req.Limit), array(only))
	case req.After.ID != "":
		return tx.Query(ctx, limited(s.sql.claimAfter, req.Limit), array(req.Skip), timestamp(req.After.Deadline), req.After.ID)
	}
	return tx.Query(ctx, limited(s.sql.claim, req.Limit), array(req.Skip))
}

// timestamp converts the zero time to -infinity; incoming.row does the reverse.
func timestamp(t time.Time) pgtype.Timestamptz {
	if t.IsZero() {
		return pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
	}
	return pgtype.Timestamptz{Time: t, Valid: true}
}

// incoming is the scan target of one claimed row after the other.
type incoming struct {
	id       string
	deadline pgtype.Timestamptz
	now      time.Time
	values   []*string
}

func (in *incoming) columns(further int) []any {
	in.values = make([]*string, further)
	dest := []any{&in.id, &in.deadline, &in.now}
	for i := range in.values {
		dest = append(dest, &in.values[i])
	}
	return dest
}

// row returns the scanned row. A deadline of -infinity becomes the zero time.
func (in *incoming) row(further []string) expiry.Row {
	row := expiry.Row{ID: in.id}
	if in.deadline.InfinityModifier == pgtype.Finite {
		row.Deadline = in.deadline.Time
	}
	if len(further) > 0 {
		row.Values = make(map[string]string, len(further))
	}
	for i, name := range further {
		if in.values[i] != nil {
			row.Values[name] = *in.values[i]
		}
	}
	return row
}

// Look implements expiry/driver.Store. It is one query; each part of it reads only the head of the index.
func (s *Store) Look(ctx context.Context, skip []string) (driver.Outlook, error) {
	var o driver.Outlook
	var first, next pgtype.Timestamptz
	err := pgcall.Use(ctx, s.pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, s.sql.look, array(skip)).Scan(&o.Now, &first, &next, &o.Overdue, &o.Undated)
	})
	if err != nil {
		return driver.Outlook{}, fmt.Errorf("expirypgx: look: %w", s.worded(err))
	}
	if first.Valid && first.InfinityModifier == pgtype.Finite {
		o.Lag = max(0, o.Now.Sub(first.Time))
	}
	switch {
	case !next.Valid || next.InfinityModifier == pgtype.Infinity:
	case next.InfinityModifier == pgtype.NegativeInfinity:
		o.Pending = true
	default:
		o.Due, o.Pending = next.Time.Sub(o.Now), true
	}
	return o, nil
}

// Overdue returns the active rows that have been due for at least the duration by (0 is allowed), longest overdue
// first. Such rows are in quarantine, locked by a transaction, or without a running sweeper. The limit must be at
// least 1. Overdue changes nothing.
func (s *Store) Overdue(ctx context.Context, by time.Duration, limit int) ([]expiry.Row, error) {
	if by < 0 || limit < 1 {
		return nil, errors.New("expirypgx: overdue: by must not be negative, and limit must be at least 1")
	}
	var rows []expiry.Row
	err := pgcall.Use(ctx, s.pool, func(ctx context.Context, conn *pgxpool.Conn) error {
		rows = nil
		result, _ := conn.Query(ctx, s.sql.overdue, by.Microseconds(), limit) // ForEachRow returns its error
		var in incoming
		_, err := pgx.ForEachRow(result, in.columns(len(s.cfg.Columns)), func() error {
			rows = append(rows, in.row(s.cfg.Columns))
			return nil
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("expirypgx: overdue: %w", s.worded(err))
	}
	return rows, nil
}

// statements has the SQL of one table.
type statements struct {
	claim      string   // $1 ids to skip
	claimAfter string   // the same, starting behind $2 deadline and $3 id
	claimOnly  string   // $1 the only ids
	expire     string   // returns the number of changed rows. $1 ids
	still      string   // returns the number of active and due rows. $1 ids
	look       string   // $1 ids to skip
	overdue    string   // $1 minimum overdue time in microseconds, $2 limit
	plans      []string // EXPLAIN of claim without locks: for all active rows, and for rows that meet Where
	fits       string   // fails if the column cannot hold either status
	nulls      string   // number of active rows that can never expire, and one of their ids
	index      string   // creates the index for all statements
	alter      string   // fixes the deadline's type
	notNull    string   // fixes active rows without a deadline
}

func newStatements(name string, c Config) (statements, error) {
	var errs []error
	quote := func(name string) string {
		quoted, err := sqlident.Quote(name)
		errs = append(errs, err)
		return quoted
	}
	value := func(s string) string {
		quoted, err := literal(s)
		errs = append(errs, err)
		return quoted
	}
	table, err := sqlident.Qualify(c.Schema, name)
	errs = append(errs, err)
	id, deadline, status := quote(c.ID), quote(c.Deadline), quote(c.Status)
	columns := id + "::text, " + deadline + ", now()"
	for _, name := range c.Columns {
		columns += ", " + quote(name) + "::text"
	}
	held := status + " = " + value(c.Active)
	active := held
	if c.Where != "" {
		active += " AND (" + c.Where + "\n)" // Where may end in a comment
	}
	undated := "FROM " + table + " WHERE " + active + " AND " + deadline + " IS NULL"
	most := strconv.Itoa(driver.MaxOverdue)
	due := active + " AND " + deadline + " <= now()"
	// ORDER BY id would sort by the selected id::text, because a bare name is first a name of the result.
	order := " ORDER BY " + table + "." + deadline + ", " + table + "." + id

	update := "UPDATE " + table + " SET " + status + " = " + value(c.Expired)
	claim := func(condition string) string {
		return "SELECT " + columns + " FROM " + table + " WHERE " + due + " AND " + condition + order + " LIMIT "
	}
	earliest := "(SELECT min(" + deadline + ") FROM " + table + " WHERE " + active

	explain := func(condition string) string {
		return "EXPLAIN (FORMAT JSON) SELECT " + columns + " FROM " + table + " WHERE " + condition + " AND " + deadline + " <= now()" + order + " LIMIT 200"
	}

	s := statements{
		claim:      claim(id + " <> ALL($1)"),
		claimAfter: claim("(" + deadline + ", " + id + ") > ($2, $3) AND " + id + " <> ALL($1)"),
		claimOnly:  claim(id + " = ANY($1)"),
		expire: "WITH put AS (" + update + " WHERE " + id + " = ANY($1) AND " + due + " RETURNING " + held + " AS held) " +
			"SELECT count(*) FILTER (WHERE NOT held) FROM put",
		still: "SELECT count(*) FROM " + table + " WHERE " + id + " = ANY($1) AND " + due,
		look: "SELECT clock_timestamp(), " + earliest + "), " + earliest + " AND " + id + " <> ALL($1)), " +
			"(SELECT count(*) FROM (SELECT FROM " + table + " WHERE " + due + " LIMIT " + most + ") overdue), " +
			"(SELECT count(*) FROM (SELECT " + undated + " LIMIT " + most + ") undated)",
		overdue: "SELECT " + columns + " FROM " + table + " WHERE " + active + " AND " + deadline +
			" <= now() - $1::bigint * interval '1 microsecond'" + order + " LIMIT $2",
		plans:   []string{explain(held), explain(active)},
		fits:    "EXPLAIN " + update + " WHERE false AND " + held,
		nulls:   "SELECT count(*), coalesce(min(id::text), '') FROM (SELECT " + id + " AS id " + undated + " LIMIT " + most + ") undated",
		index:   "CREATE INDEX CONCURRENTLY ON " + table + " (" + deadline + ", " + id + ") WHERE " + held,
		alter:   "ALTER TABLE " + table + " ALTER " + deadline + " TYPE timestamptz USING " + deadline + " AT TIME ZONE 'UTC'",
		notNull: "UPDATE " + table + " SET " + deadline + " = 'infinity' WHERE " + active + " AND " + deadline + " IS NULL; ALTER TABLE " + table + " ALTER " + deadline + " SET NOT NULL",
	}
	return s, errors.Join(errs...)
}

// limited completes a claim. The limit is part of the statement: with a parameter the planner would plan each
// execution again. A sweeper halves and doubles one number, so there are few different statements.
func limited(claim string, limit int) string {
	return claim + strconv.Itoa(limit) + " FOR UPDATE SKIP LOCKED"
}

var escape = strings.NewReplacer(`\`, `\\`, `"`, `\"`)

// array returns ids as the text of a Postgres array. The server parses it as an array of the column's type.
func array(ids []string) string {
	var b strings.Builder
	b.WriteByte('{')
	for i, id := range ids {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('"')
		b.WriteString(escape.Replace(id))
		b.WriteByte('"')
	}
	b.WriteByte('}')
	return b.String()
}

// Config describes the table. The zero value is for a table with the columns id, expires_at and status, whose rows
// change from held to expired.
type Config struct {
	// Schema is the schema of the table. Default: the search path decides.
	Schema string

	// ID, Deadline and Status are columns: the primary key (uuid, text or an integer), a timestamptz and the status.
	// Default: "id", "expires_at" and "status".
	ID, Deadline, Status string

	// Active is the status of rows that can expire, Expired is their status afterwards. The column may be text or an
	// enum. Default: "held" and "expired".
	Active, Expired string

	// Columns are further columns to read. expiry.Row.Values has their values as text. Optional.
	Columns []string

	// Where is a further SQL condition that rows must meet, such as "deleted_at IS NULL". It is copied unchanged into
	// every statement, so it must come from your code, never from outside. It must not fail for any row: a failure
	// stops all rows. Optional.
	Where string

	// Emit is called in the transaction of the batch with the rows that have just expired, longest overdue first.
	// Write to the outbox here, in one call for all rows; Messages makes such a function. An error rolls the batch
	// back; *expiry.RowError names the row at fault. Emit may be called again for the same rows, so all its effects
	// must be in tx. A panic counts as an error. Default: only the status changes.
	Emit func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error

	// Isolation is the isolation level of the transactions. Default: pgx.ReadCommitted.
	Isolation pgx.TxIsoLevel

	// PollOnly turns off sending and receiving notifications, for a pool behind a pooler in transaction mode.
	// Sweepers then find rows that other processes made by polling, every expiry.SweeperConfig.PollInterval.
	PollOnly bool

	Logger *slog.Logger // Default: slog.Default().
}

func (c Config) withDefaults() Config {
	c.ID = cmp.Or(c.ID, "id")
	c.Deadline = cmp.Or(c.Deadline, "expires_at")
	c.Status = cmp.Or(c.Status, "status")
	c.Active = cmp.Or(c.Active, "held")
	c.Expired = cmp.Or(c.Expired, "expired")
	c.Isolation = cmp.Or(c.Isolation, pgx.ReadCommitted)
	c.Columns = slices.Clone(c.Columns)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	column := map[string]string{}
	name := func(field, value string, unique bool) {
		if err := sqlident.Check(value); err != nil {
			errs = append(errs, fmt.Errorf("expirypgx: Config.%s: %w", field, err))
		}
		if other, taken := column[value]; unique && taken {
			errs = append(errs, fmt.Errorf("expirypgx: Config.%s and Config.%s are the same column %q", other, field, value))
		}
		if unique {
			column[value] = field
		}
	}
	if c.Schema != "" {
		name("Schema", c.Schema, false)
	}
	name("ID", c.ID, true)
	name("Deadline", c.Deadline, true)
	name("Status", c.Status, true)
	for i, col := range c.Columns {
		name(fmt.Sprintf("Columns[%d]", i), col, false)
	}
	_, activeErr := literal(c.Active)
	_, expiredErr := literal(c.Expired)
	if activeErr != nil {
		errs = append(errs, fmt.Errorf("expirypgx: Config.Active: %w", activeErr))
	}
	if expiredErr != nil {
		errs = append(errs, fmt.Errorf("expirypgx: Config.Expired: %w", expiredErr))
	}
	if c.Active == c.Expired {
		errs = append(errs, fmt.Errorf("expirypgx: Config.Active and Config.Expired are both %q", c.Active))
	}
	switch c.Isolation {
	case pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		errs = append(errs, fmt.Errorf("expirypgx: Config.Isolation: %q is not supported", c.Isolation))
	}
	return errors.Join(errs...)
}

// maxLiteral is longer than any reasonable status.
const maxLiteral = 63

// literal quotes a status. The status is part of the statement, not a parameter, so that the planner can use an index
// restricted to it.
func literal(s string) (string, error) {
	if s == "" || len(s) > maxLiteral {
		return "", fmt.Errorf("status of %d characters, want 1 to %d", len(s), maxLiteral)
	}
	for _, r := range s {
		if r < ' ' || r == '\\' || r == 0x7f || r == 0xfffd {
			return "", fmt.Errorf("status %q: control characters and backslashes are not allowed", s)
		}
	}
	return "'" + strings.ReplaceAll(s, "'", "''") + "'", nil
}

// Messages returns a function for Config.Emit that makes a message from every row and writes them in one call. write
// is the Write method of an outbox's store. If message fails for a row, that row is at fault.
func Messages[M any](
	write func(ctx context.Context, tx pgx.Tx, messages ...M) error,
	message func(row expiry.Row) (M, error),
) func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
	return func(ctx context.Context, tx pgx.Tx, rows []expiry.Row) error {
		messages := make([]M, len(rows))
		for i, row := range rows {
			err := guarded("the message of a row", func() (err error) {
				messages[i], err = message(row)
				return err
			})
			if err != nil {
				return &expiry.RowError{ID: row.ID, Err: err}
			}
		}
		return write(ctx, tx, messages...)
	}
}

// guarded converts a panic of a callback to an error.
func guarded(what string, call func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("expirypgx: panic in %s: %v", what, p)
		}
	}()
	return call()
}

const (
	// channelPrefix is the first part of the name of a table's channel.
	channelPrefix = "holdfast_expiry_"
	// notifyInterval is the shortest time between two notifications of one Store.
	notifyInterval = 50 * time.Millisecond
	// keepNotifying is how long a failing notification is retried. By then all sweepers have polled.
	keepNotifying = 90 * time.Second
	// probeInterval is the time between two tests of the listening connection.
	probeInterval = 3 * time.Second
	// farOff is the distance from which a deadline is not announced: sweepers poll at least every 90 s, and this
	// host's clock may be ten minutes behind the server's clock.
	farOff = 2*90*time.Second + 10*time.Minute
)

// Due announces that the transaction makes or changes a row that falls due at the deadline. After the commit the
// sweepers of this process are woken at once, and those of other processes within milliseconds. For these the Store
// sends a NOTIFY in a separate transaction, at most once in 50 ms, because Postgres lets only one transaction with a
// NOTIFY commit at a time. A deadline more than thirteen minutes away is not announced to other processes, whose
// sweepers find it by polling.
//
// Due returns false if tx does not come from a txretry.Manager, but for example from the pool: then call Wake after
// its commit.
func (s *Store) Due(tx pgx.Tx, deadline time.Time) bool {
	return txdriver.Hint(tx, func() { s.Wake(deadline) })
}

// Wake does immediately what Due does after a commit. Pass the stored deadline; zero means an unknown time. Wake
// never blocks.
func (s *Store) Wake(deadline time.Time) {
	s.sweepers.Wake(deadline)
	if !s.cfg.PollOnly && (deadline.IsZero() || time.Until(deadline) < farOff) {
		s.sender.Tell(deadline)
	}
}

// Background implements expiry/driver.Background. It wakes a sweeper of this process until ctx ends. With several
// sweepers on one Store, the first one receives notifications of other processes for all of them; the next one takes
// over from it. The listening connection is taken out of the pool, in addition to the pool's maximum.
func (s *Store) Background(ctx context.Context, wake func(at time.Time)) {
	defer s.sweepers.Add(wake)()
	wake(time.Time{}) // for rows of this process made since the sweeper's first Look
	s.warnOfHidden(ctx)
	if s.cfg.PollOnly {
		<-ctx.Done()
		return
	}
	select {
	case s.listening <- struct{}{}:
		defer func() { <-s.listening }()
	case <-ctx.Done():
		return
	}
	s.listener.Run(ctx)
}

// warnOfHidden logs once that row-level security hides rows. Otherwise nobody would notice, because a sweeper that
// sees no rows has nothing to do.
func (s *Store) warnOfHidden(ctx context.Context) {
	found := check.Findings{Component: "expirypgx"}
	err := pgcall.Within(ctx, s.pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) error {
		return pgcheck.Hidden(ctx, conn, &found, s.qualified())
	})
	if hidden := found.Err(); err == nil && hidden != nil {
		s.cfg.Logger.WarnContext(ctx, "expirypgx: rows are hidden from the sweeper", slog.String("table", s.table()), slog.Any("error", hidden))
	}
}

// connect makes the sender and the listener of notifications. Both are idle until their first use.
func (s *Store) connect(table string) {
	channel := pgnotify.Channel{Pool: s.pool, Prefix: channelPrefix, Table: table}
	warn := func(message string) func(context.Context, error) {
		return func(ctx context.Context, err error) {
			s.cfg.Logger.WarnContext(ctx, message, slog.String("table", s.table()), slog.Any("error", err))
		}
	}
	s.listening = make(chan struct{}, 1)
	s.sender = pgnotify.NewSender(pgnotify.SenderConfig{
		Channel: channel, Interval: notifyInterval, Keep: keepNotifying,
		Failed: warn("expirypgx: could not wake sweepers of other processes"),
	})
	s.listener = pgnotify.NewListener(pgnotify.ListenerConfig{
		Channel: channel, Wake: s.sweepers.Wake, ProbeInterval: probeInterval,
		Failed: warn("expirypgx: not receiving wake-ups of other processes"),
	})
}
