/* Floors: a row whose transaction takes its number early and commits late is never below the floor of its lane.
 *
 * Abstracts, of outbox/outboxpgx: horizon.saw, question, answer and limit, lowerSQL and writersSQL
 * (horizon.go); claim and settle of 0006_outbox_relay.sql, as far as they read and raise floors; releaseSQL
 * (waiting.go). Two rounds of one relay share its horizon.
 * Leaves out: leases (lanes.pml), times (a question may be left out at any time), dead letters, prepared transactions,
 * horizon.forget (like a new era), and the order of a key until the scan after a restart by hand (doc.go: stop the relays).
 *
 * PROPERTY safety: no row is below its floor, except after a restart by hand; every committed row is published
 * MUTANT_1 safety: an answer has no open transactions
 * MUTANT_2 safety: the numbers read since the question count as asked
 * MUTANT_3 safety: a settlement raises floors in another era, too
 * MUTANT_4 safety: a released row does not lower the floor
 * MUTANT_5 safety: the scan lowers only the lanes that have a row below (a fault of ours)
 * MUTANT_6 safety: an answer to a question from before a reset counts
 * MUTANT_7 safety: an INSERT takes its number before its lock
 * MUTANT_8 safety: nobody scans below the floors
 */
#define LANE(i) ((i) / 2) /* of three rows; row 2 has a lane of its own */
#define READY(i) (row[i] == ready && seq[i] >= floor[LANE(i)])
#define BELOW(i) (row[i] == ready && seq[i] < floor[LANE(i)])
#define LATE(i) (row[i] == open && seq[i] < floor[LANE(i)])
#define CLAIMABLE(l) (token[l] == 0 && (l == 0 && (READY(0) || READY(1)) || l == 1 && READY(2)))
#define MAX(a, b) (a > b -> a : b)
#define MIN(a, b) (a < b -> a : b)
#define SOUND assert(restarted || !(BELOW(0) || BELOW(1) || BELOW(2) || LATE(0) || LATE(1) || LATE(2)))

mtype = { none, open, ready, waiting, gone };
mtype row[3] = none;
bool locked[3];              /* the transaction that writes the row has a lock on the table */
byte seq[3], next = 1;
byte floor[2] = 1, token[2]; /* of the lanes; the token is the round that holds the lane */
byte era = 1;                /* of the lanes, with the start of the server */
bool restarted;              /* by hand, and no scan has noticed it */
byte restarts, faults;
byte hEra, seen, safe, pending, writers, asking; /* the horizon; asking is the round that asks */

inline reset() { seen = 0; safe = 0; pending = 0; writers = 0; asking = 0 }
inline remove(i) { row[i] = gone; seq[i] = 0 }
inline drop(i) { if :: row[i] != none -> remove(i) :: else fi }

proctype Writer(byte i) {
#ifndef MUTANT_7
	locked[i] = true;
#endif
	d_step { seq[i] = next; next++; row[i] = open }
#ifdef MUTANT_7
	locked[i] = true;
#endif
	atomic {
		if :: row[i] == open -> row[i] = ready :: remove(i) /* rolled back, by a restart at the latest */ fi;
		SOUND }
	locked[i] = false /* after others see the row */
}

inline read(i) { if :: LANE(i) == lane && READY(i) -> batch = batch | 1 << i; top = MAX(seq[i], top) :: else fi }
inline least(i) { if :: LANE(i) == lane && READY(i) -> limit = MIN(seq[i], limit) :: else fi }
inline outcome(i) { if
	:: batch & 1 << i && row[i] == ready -> remove(i) /* published */
	:: batch & 1 << i && row[i] == ready && faults > 0 -> faults--; row[i] = waiting
	:: else fi }

proctype Round(byte me) {
	byte lane, batch, top, limit, mine, upTo, held;
	bool asked;
end:	do
	:: d_step { CLAIMABLE(0) || CLAIMABLE(1) -> /* claim: lease a lane, read its rows from the floor */
		lane = (CLAIMABLE(0) -> 0 : 1); token[lane] = me; mine = era; read(0); read(1); read(2) }
	   atomic { /* saw, limit, question. In a new era the batch is released */
		if
		:: mine != hEra -> batch = (hEra != 0 -> 0 : batch); reset(); hEra = mine
		:: else
		fi;
		seen = MAX(top, seen); top = 0; limit = safe + 1;
		if
		:: asking == 0 && seen > safe -> asking = me; asked = true; upTo = seen
		:: true /* it is not due, or another round asks */
		fi }
	   atomic { /* settle, if the token is still there; then the transactions that write */
		if
		:: token[lane] == me -> outcome(0); outcome(1); outcome(2); token[lane] = 0; least(0); least(1); least(2);
			if
#ifdef MUTANT_3
			:: limit > floor[lane] -> floor[lane] = limit
#endif
			:: mine == era && limit > floor[lane] -> floor[lane] = limit
			:: else
			fi
		:: else
		fi;
		SOUND; batch = 0; limit = 0; mine = 0; lane = 0;
		if :: asked -> held = locked[0] | locked[1] << 1 | locked[2] << 2 :: else fi }
	   if
	   :: d_step { asked ->
#ifdef MUTANT_1
		held = 0;
#endif
#ifdef MUTANT_2
		upTo = seen;
#endif
#ifdef MUTANT_6
		asking = me;
#endif
		if
		:: asking == me -> asking = 0; writers = writers & held; /* answer */
			if :: writers == 0 -> safe = pending; pending = upTo; writers = held :: else fi
		:: else
		fi;
		asked = false; upTo = 0; held = 0 }
	   :: !asked
	   fi
	od
}

inline release(i) { /* a failed row is due again */
	row[i] = ready;
#ifndef MUTANT_4
	floor[LANE(i)] = MIN(floor[LANE(i)], seq[i]);
#endif
	SOUND }

active proctype Database() {
end:	do
	:: atomic { row[0] == waiting -> release(0) }
	:: atomic { row[1] == waiting -> release(1) }
	:: atomic { row[2] == waiting -> release(2) }
#ifndef MUTANT_8
	:: atomic { BELOW(0) || BELOW(1) || BELOW(2) -> /* a relay scans below the floors */
#ifdef MUTANT_5
		if :: BELOW(2) -> floor[1] = 0 :: BELOW(0) || BELOW(1) -> floor[0] = 0 fi;
#else
		floor[0] = 0; floor[1] = 0;
#endif
		era++; restarted = false; SOUND }
#endif
	:: d_step { restarts > 0 -> restarts--; /* a failover loses all numbers; the floors go back, the tokens stay */
		drop(0); drop(1); drop(2); next = 1; floor[0] = 1; floor[1] = 1; era++ }
	od
}

active proctype Monitor() { row[0] == gone && row[1] == gone && row[2] == gone }

init { atomic {
	if
	:: restarted = true; floor[0] = 3; floor[1] = 3; hEra = 1; seen = 2; safe = 2; pending = 2 /* TRUNCATE RESTART IDENTITY */
	:: restarts = 1; faults = 1
	:: faults = 2
	fi;
	run Writer(0); run Writer(1); run Writer(2); run Round(1); run Round(2) }
}
