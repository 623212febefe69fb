package outboxpgx

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/check"
)

const (
	// maxClockDifference is how far this host's clock may be from the database's.
	maxClockDifference = time.Second
	// maxHorizonAge is for how long a transaction may hold back the removal of dead rows.
	maxHorizonAge = 10 * time.Minute
	// maxSlotAge is the same for a replication slot, in transactions: a slot has no time.
	maxSlotAge = 100_000
	// maxHolders bounds the findings of one kind.
	maxHolders = 5
)

// checkServer looks at what keeps the tables small and the times right.
func (s *Store) checkServer(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	for _, look := range []func(context.Context, *pgxpool.Conn, *check.Findings) error{s.checkAutovacuum, s.checkHorizon, s.checkClock} {
		if err := look(ctx, conn, found); err != nil {
			return err
		}
	}
	return nil
}

// shipped finds the storage parameters of the tables in the files of Schema.
var shipped = regexp.MustCompile(`(?s)CREATE TABLE \{\{(\w+)\}\} \([^;]*?\n\) WITH \(([^)]*)\);`)

// checkAutovacuum wants the settings of the tables that the migrations set; whoever has set other
// values has done so on purpose.
func (s *Store) checkAutovacuum(ctx context.Context, conn *pgxpool.Conn, found *check.Findings) error {
	var on bool
	err := conn.QueryRow(ctx, `SELECT current_setting('autovacuum')::bool AND current_setting('track_counts')::bool`).Scan(&on)
	if err != nil {
		return err
	}
	if !on {
		found.Add("ALTER SYSTEM SET autovacuum = on; ALTER SYSTEM SET track_counts = on; SELECT pg_reload_conf()",
			"autovacuum is off, so that the tables grow without end")
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

// checkParameters takes a list such as "fillfactor = 20, autovacuum_vacuum_threshold = 200", or "".
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

// horizonSQL are the transactions, prepared transactions and slots for whose sake dead rows are kept.
// $1 seconds, $2 transactions, $3 limit of each kind.
const horizonSQL = `
(SELECT format('transaction of process %s (%s, %s)', pid, coalesce(nullif(application_name, ''), 'no application name'), state),
        format('has been open for %s', date_trunc('second', clock_timestamp() - xact_start)),
        format('end it, for example by SELECT pg_terminate_backend(%s), and set idle_in_transaction_session_timeout', pid)
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

// checkHorizon sees of other users' sessions what the role may see: all with pg_read_all_stats.
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

// checkClock asks for the time twice: the first question may wait for a connection.
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
		found.Add("have both hosts set their clocks by NTP",
			"the clocks of this host and of the database differ by %v: ages of messages are measured wrong by that", difference.Round(100*time.Millisecond))
	}
	return nil
}
