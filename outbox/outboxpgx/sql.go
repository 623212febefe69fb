package outboxpgx

import "strings"

// statements are the SQL of writing and of relays, with the names of the tables filled in.
type statements struct {
	insertOne, insert                    string
	remember, recall                     string
	claim, read, readRuns, countLosses   string
	lower, writers                       string
	lockDue, holdDue, holdReady, release string
	settle, locked, look, lock, renew    string
	stillReady, due                      string
}

func (t tables) statements() statements {
	parts := strings.NewReplacer("{ready}", ready, "{waiting}", waiting, "{before}", before, "{free}", free, "{heldUntil}", heldUntil,
		"{held}", strings.ReplaceAll(heldSQL, "{heldUntil}", heldUntil),
		"{fits}", strings.ReplaceAll(fits, "{max}", "$4::bigint"), "{record}", recordColumns)
	fill := func(sql string) string { return t.fill(parts.Replace(sql)) } // a part may name a table
	due := func(sql, skip, only string) string {
		rows := strings.NewReplacer("{skip}", skip, "{only}", only).Replace(dueRowsSQL)
		return fill(strings.ReplaceAll(sql, "{dueRows}", rows))
	}
	read := func(rows string) string {
		return fill(strings.ReplaceAll(strings.ReplaceAll(readSQL, "{rows}", rows), "{share}", shareSQL))
	}
	return statements{
		insertOne: fill(insertOneSQL), insert: fill(insertSQL),
		remember: fill(rememberSQL), recall: fill(recallSQL),
		claim: fill(claimSQL), read: read(rowsSQL), readRuns: read(runsSQL), countLosses: fill(countLossesSQL),
		lower: fill(lowerSQL), writers: writersSQL,
		lockDue: due(lockDueSQL, "$2", "$3"), due: due(dueSQL, "$2", "$3"),
		holdDue: due(holdDueSQL, "$3", "$4"), holdReady: fill(holdReadySQL), release: due(releaseSQL, "$7", "$8"),
		settle: fill(settleSQL), locked: fill(lockedSQL), look: fill(lookSQL), lock: fill(lockSQL), renew: fill(renewSQL),
		stillReady: fill(stillReadySQL),
	}
}

// A transaction of a relay is one round trip at READ COMMITTED. A queue at SERIALIZABLE would abort
// itself, because rows that SKIP LOCKED passes over count as read.
const (
	beginSQL      = `BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE`
	commitSQL     = `COMMIT`
	commitGoOnSQL = `COMMIT AND CHAIN` // begins another transaction like this one
)

// settingsSQL comes first in each transaction of a relay that no function of the schema begins: see
// migrations/0006_outbox_relay.sql, which has the same settings, and why.
const settingsSQL = `
SELECT set_config('idle_in_transaction_session_timeout', '5s', true), set_config('plan_cache_mode', 'force_generic_plan', true),
       set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true), set_config('enable_hashjoin', 'off', true),
       set_config('enable_mergejoin', 'off', true), set_config('jit', 'off', true)`

// asyncCommitSQL lets a claim commit without waiting for the disk. A claim that a crash of the database
// undoes is noticed when it is settled, since no other claim has its token. A settlement waits for the
// disk, and makes durable what its claim wrote.
const asyncCommitSQL = `SELECT set_config('synchronous_commit', 'off', true)`

// lookTimeoutSQL bounds a look below the floors to a twentieth of the time between two looks.
const lookTimeoutSQL = `SELECT set_config('statement_timeout', '250ms', true)`

// The states of a row o that is not published.
const (
	ready   = `o.published_at IS NULL AND o.due_at IS NULL`
	waiting = `o.published_at IS NULL AND o.due_at IS NOT NULL`
)

// free is NULL for a row o that another session has locked, be it to change it or for a foreign key. Waiting for such a row
// would hold up all the others for as long as that session likes. Few rows have an xmax, by which some session has
// locked them at some time, so few are asked for.
const free = `CASE WHEN o.xmax = 0 THEN true ELSE (SELECT true FROM {outbox} x WHERE x.id = o.id FOR UPDATE SKIP LOCKED) END`

// before finds the waiting row p nearest before o in its key. It takes the nearest, since before the first
// may lie the index entries of many rows that are gone. An empty key has no order. o must not be published.
const before = `p.ordering_key = o.ordering_key AND o.ordering_key <> '' AND p.seq < o.seq AND p.published_at IS NULL AND p.due_at IS NOT NULL ORDER BY p.seq DESC LIMIT 1`
