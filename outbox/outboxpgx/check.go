package outboxpgx

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
	"github.com/holdfast-go/holdfast/internal/pgcall"
	"github.com/holdfast-go/holdfast/internal/pgcheck"
	"github.com/holdfast-go/holdfast/outbox/driver"
)

const fixMigrate = "call Migrate, or apply the files of Schema"

// Check compares the server with the requirements of the outbox: tables, columns, indexes, lanes and functions exist;
// no trigger, rule or row-level security drops changes of its tables; autovacuum is on, and nothing holds it back for
// more than 10 minutes; the clock agrees with this host's to a second; and notifications arrive, unless
// Config.PollOnly is set. It returns nil if all requirements are met. Otherwise Unwrap() []error of the error returns
// the findings, each with a method Fix() string that returns the fix, and the errors of checks that failed to run,
// which have no such method.
func (s *Store) Check(ctx context.Context) error {
	var found check.Findings
	var complete bool
	err := pgcall.Twice(ctx, s.pool, checkTimeout, func(ctx context.Context, conn *pgxpool.Conn) (err error) {
		found = check.Findings{Component: "outboxpgx"}
		complete, err = s.check(ctx, conn, &found)
		return err
	})
	if err == nil && complete {
		err = s.checkWakeUps(ctx, &found)
	}
	if err != nil {
		found.Join(fmt.Errorf("outboxpgx: check: %w", err))
	}
	return found.Err()
}

// checkTimeout is the time limit of one attempt's queries, without the test of notifications.
const checkTimeout = 10 * time.Second

// check reports whether the table is complete. If it is not, further queries would fail.
func (s *Store) check(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) (complete bool, err error) {
	if err := pgcheck.Settings(ctx, conn, found); err != nil {
		return false, err
	}
	complete, err = s.checkColumns(ctx, conn, found)
	if err != nil || !complete {
		return false, err
	}
	if err := s.checkIndexes(ctx, conn, found); err != nil {
		return false, err
	}
	if err := s.checkLanes(ctx, conn, found); err != nil {
		return false, err
	}
	if err := s.checkFunctions(ctx, conn, found); err != nil {
		return false, err
	}
	if err := pgcheck.Drops(ctx, conn, found, s.t.outbox, s.t.lanes, s.t.dead, s.t.audit, s.t.pause, s.t.dedup); err != nil {
		return false, err
	}
	return true, s.checkServer(ctx, conn, found)
}

func (s *Store) checkLanes(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	var lanes int
	err := conn.QueryRow(ctx, `SELECT count(*) FROM `+s.t.lanes+` WHERE lane >= 0 AND lane < $1`, driver.Lanes).Scan(&lanes)
	if err != nil {
		return err
	}
	if lanes != driver.Lanes {
		found.Add(fmt.Sprintf("INSERT INTO %s (lane) SELECT generate_series(0, %d) ON CONFLICT DO NOTHING", s.t.lanes, driver.Lanes-1),
			"table %s has %d of %d lanes; messages of the missing lanes are never published", s.t.lanes, lanes, driver.Lanes)
	}
	return nil
}

func (s *Store) checkFunctions(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	for _, function := range []string{s.t.write, s.t.claim, s.t.settle, s.t.record, s.t.look, s.t.ignored} {
		var exists bool
		if err := conn.QueryRow(ctx, `SELECT to_regproc($1) IS NOT NULL`, function).Scan(&exists); err != nil {
			return err
		}
		if !exists {
			found.Add(fixMigrate, "function %s does not exist", function)
		}
	}
	return nil
}

// checkColumns reports whether all columns exist.
func (s *Store) checkColumns(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) (complete bool, err error) {
	complete = true
	for suffix, table := range map[string]string{"": s.t.outbox, "_lanes": s.t.lanes, "_dead": s.t.dead, "_audit": s.t.audit, "_pause": s.t.pause, "_dedup": s.t.dedup} {
		missing, err := s.missingColumns(ctx, conn, table, wanted[suffix])
		if err != nil {
			return false, err
		}
		if len(missing) == len(wanted[suffix]) {
			complete = false
			found.Add(fixMigrate, "table %s does not exist", table)
		} else if len(missing) > 0 {
			complete = false
			found.Add(fixMigrate, "table %s lacks the columns %v", table, missing)
		}
	}
	return complete, nil
}

// wanted has the required columns by the suffix of the table's name.
var wanted = map[string][]string{
	"": {
		"id", "seq", "lane", "name", "body", "content_type", "headers", "ordering_key", "transport_name", "exchange", "routing_key",
		"route_headers", "created_at", "published_at", "due_at", "held", "attempts", "error_class", "last_error",
	},
	"_lanes": {"lane", "token", "lease_until", "floor", "batch", "suspect", "alone", "losses", "era"},
	"_dead": {
		"id", "seq", "lane", "name", "body", "content_type", "headers", "ordering_key", "transport_name", "exchange", "routing_key",
		"route_headers", "created_at", "attempts", "error_class", "last_error", "died_at", "fingerprint",
	},
	"_audit": {"id", "at", "actor", "reason", "action", "count", "filter"},
	"_pause": {"part", "actor", "reason", "since"},
	"_dedup": {"key", "id", "expires_at"},
}

// missingColumns returns the columns that the table lacks: all of them if there is no such table.
func (s *Store) missingColumns(ctx context.Context, conn *pgxpool.Conn, qualified string, columns []string) ([]string, error) {
	rows, _ := conn.Query(ctx, `
		SELECT c FROM unnest($2::text[]) AS c
		WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = to_regclass($1) AND a.attname = c AND a.attnum > 0 AND NOT a.attisdropped)`,
		qualified, columns)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func (s *Store) checkIndexes(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	indexes := map[string]string{
		"_pkey": s.t.outbox, "_ready": s.t.outbox, "_parked": s.t.outbox, "_held": s.t.outbox, "_published": s.t.outbox,
		"_lanes_pkey": s.t.lanes, "_dead_pkey": s.t.dead, "_dead_died": s.t.dead, "_audit_pkey": s.t.audit, "_audit_at": s.t.audit,
		"_pause_pkey": s.t.pause, "_dedup_pkey": s.t.dedup, "_dedup_expires": s.t.dedup,
	}
	for suffix, on := range indexes {
		var valid bool
		err := conn.QueryRow(ctx, `
			SELECT coalesce(bool_or(i.indisvalid), false) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
			WHERE i.indrelid = to_regclass($1) AND c.relname = $2`, on, s.cfg.Table+suffix).Scan(&valid)
		if err != nil {
			return err
		}
		if !valid {
			found.Add("create the index as in the files of Schema", "index %s is missing or invalid", s.cfg.Table+suffix)
		}
	}
	return nil
}

const (
	// maxClockDifference is the largest allowed difference between this host's clock and the database's.
	maxClockDifference = time.Second
	// maxHorizonAge is how long a transaction may hold back the removal of dead rows.
	maxHorizonAge = 10 * time.Minute
	// maxSlotAge is the same limit for a replication slot, in transactions, because a slot has no time.
	maxSlotAge = 100_000
	// maxHolders is the maximum number of findings of one kind.
	maxHolders = 5
)

// checkServer checks autovacuum, old snapshots and the clock.
func (s *Store) checkServer(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	for _, look := range []func(context.Context, *pgxpool.Conn, *check.Findings) error{s.checkAutovacuum, s.checkHorizon, s.checkClock} {
		if err := look(ctx, conn, found); err != nil {
			return err
		}
	}
	return nil
}

// shipped matches the storage parameters of the tables in the files of Schema.
var shipped = regexp.MustCompile(`(?s)CREATE TABLE \{\{(\w+)\}\} \([^;]*?\n\) WITH \(([^)]*)\);`)

// checkAutovacuum requires the storage parameters of the migrations. It accepts other values of them, because
// somebody has set those on purpose.
func (s *Store) checkAutovacuum(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	var on bool
	err := conn.QueryRow(ctx, `SELECT current_setting('autovacuum')::bool AND current_setting('track_counts')::bool`).Scan(&on)
	if err != nil {
		return err
	}
	if !on {
		found.Add("ALTER SYSTEM SET autovacuum = on; ALTER SYSTEM SET track_counts = on; SELECT pg_reload_conf()",
			"autovacuum is off, so the tables grow without limit")
	}
	text, err := files.ReadFile("migrations/0001_outbox.sql")
	if err != nil {
		return err
	}
	parameters := map[string]string{}
	for _, found := range shipped.FindAllStringSubmatch(string(text), -1) {
		parameters[found[1]] = found[2]
	}
	for _, t := range [...]struct{ name, table string }{
		{"table", s.t.outbox}, {"lanes", s.t.lanes}, {"dead", s.t.dead}, {"audit", s.t.audit}, {"dedup", s.t.dedup},
	} {
		if err := s.checkParameters(ctx, conn, t.table, parameters[t.name], found); err != nil {
			return err
		}
	}
	return nil
}

// checkParameters accepts a list such as "fillfactor = 20, autovacuum_vacuum_threshold = 200", or "".
func (s *Store) checkParameters(ctx context.Context, conn *pgxpool.Conn, table, list string, found *check.Findings) error {
	var set map[string]string
	err := conn.QueryRow(ctx, `
		SELECT coalesce(jsonb_object_agg(option_name, option_value), '{}') FROM pg_class c, pg_options_to_table(c.reloptions)
		WHERE c.oid = to_regclass($1)`, table).Scan(&set)
	if err != nil {
		return err
	}
	if v, ok := set["autovacuum_enabled"]; ok && v != "true" && v != "on" && v != "1" {
		found.Add(fmt.Sprintf("ALTER TABLE %s RESET (autovacuum_enabled)", table), "autovacuum is off for table %s", table)
	}
	var missing []string
	for parameter := range strings.SplitSeq(list, ",") {
		name, _, found := strings.Cut(parameter, "=")
		if _, ok := set[strings.TrimSpace(name)]; found && !ok {
			missing = append(missing, strings.TrimSpace(parameter))
		}
	}
	if len(missing) > 0 {
		settings := strings.Join(missing, ", ")
		found.Add(fmt.Sprintf("ALTER TABLE %s SET (%s)", table, settings), "table %s lacks the storage parameters %s", table, settings)
	}
	return nil
}

// horizonSQL returns the transactions, prepared transactions and slots that prevent the removal of dead rows.
// $1 seconds, $2 transactions, $3 limit of each kind.
const horizonSQL = `
(SELECT format('transaction of process %s (%s, %s)', pid, coalesce(nullif(application_name, ''), 'no application name'), state),
        format('has been open for %s', date_trunc('second', clock_timestamp() - xact_start)),
        format('end it, for example with SELECT pg_terminate_backend(%s), and set idle_in_transaction_session_timeout', pid)
 FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type <> 'autovacuum worker' AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND xact_start < now() - $1 * interval '1 second'
 ORDER BY xact_start LIMIT $3)
UNION ALL
(SELECT format('prepared transaction %L', gid),
        format('has been open for %s', date_trunc('second', clock_timestamp() - prepared)),
        format('COMMIT PREPARED %L, or ROLLBACK PREPARED %L', gid, gid)
 FROM pg_prepared_xacts WHERE database = current_database() AND prepared < now() - $1 * interval '1 second'
 ORDER BY prepared LIMIT $3)
UNION ALL
(SELECT format('replication slot %L (%s)', slot_name, CASE WHEN active THEN 'active' ELSE 'not active' END),
        format('is %s transactions behind', age(xmin)),
        format('end the long transaction on its standby, or, if nobody needs the slot, SELECT pg_drop_replication_slot(%L)', slot_name)
 FROM pg_replication_slots WHERE xmin IS NOT NULL AND age(xmin) > $2
 ORDER BY age(xmin) DESC LIMIT $3)`

// checkHorizon includes other users' sessions only if the role may see them: all of them with pg_read_all_stats.
func (s *Store) checkHorizon(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	rows, _ := conn.Query(ctx, horizonSQL, maxHorizonAge.Seconds(), maxSlotAge, maxHolders) // CollectRows returns its error
	holders, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (h [3]string, err error) {
		return h, row.Scan(&h[0], &h[1], &h[2])
	})
	for _, h := range holders {
		found.Add(h[2], "the %s %s: Postgres keeps all rows deleted since then", h[0], h[1])
	}
	return err
}

// checkClock reads the time twice, because the first query may wait for a connection.
func (s *Store) checkClock(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	var difference, trip time.Duration
	for range 2 {
		var theirs time.Time
		begin := time.Now()
		if err := conn.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&theirs); err != nil {
			return err
		}
		trip = time.Since(begin)
		difference = theirs.Sub(begin.Add(trip / 2)).Abs()
	}
	if difference > maxClockDifference+trip/2 {
		found.Add("synchronize the clocks of both hosts with NTP",
			"the clocks of this host and of the database differ by %v, so message ages are wrong by that much", difference.Round(100*time.Millisecond))
	}
	return nil
}

// hidden records whether row-level security hides rows from the relay's role. For such a relay the outbox looks
// empty. A claim that finds nothing therefore checks for it now and then.
type hidden struct {
	mu     sync.Mutex
	looked time.Time
	found  error
}

// lookHidden is the minimum time between two such checks.
const lookHidden = 30 * time.Second

func (h *hidden) due() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.looked.IsZero() && time.Since(h.looked) < lookHidden {
		return false
	}
	h.looked = time.Now()
	return true
}

func (h *hidden) set(found error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.found = found
}

func (h *hidden) err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.found
}

// checkHidden checks for row-level security on the tables that a claim reads.
func (s *Store) checkHidden(ctx context.Context) error {
	if !s.hidden.due() {
		return nil
	}
	found := check.Findings{Component: "outboxpgx"}
	err := s.use(ctx, func(ctx context.Context, conn *pgxpool.Conn) error {
		return pgcheck.Hidden(ctx, conn, &found, s.t.outbox, s.t.lanes)
	})
	if err == nil {
		s.hidden.set(found.Err())
	}
	return err
}
