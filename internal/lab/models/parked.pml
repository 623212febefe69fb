/* Parked keys: a dead letter stops its ordering key, the later messages wait behind it, an operator frees the key.
 *
 * Abstracts, of inbox/inboxpgx: Store.alone, withoutEntry, atBegin (process.go, entries.go), Stop, park (parked.go),
 * the statements stop, wait, claim, take, next, retry, fail, free, replay and remove of parking.go, and drain.key and
 * message (drain.go). Two consumers: the queue may move to the second while the first one works on a message.
 * Leaves out: batches, runs and quarantine, MaxParked, pauses, and the turns of other keys.
 *
 * PROPERTY safety: one effect per message, in order, none after its removal; one process runs a key; in the end it is free
 * MUTANT_1 safety: take does not check the claim
 * MUTANT_2 safety: take does not lock the row of the key
 * MUTANT_3 safety: no foreign key keeps a key with messages
 * MUTANT_4 safety: a message of a stopped key runs
 * MUTANT_5 safety: a parked message is deleted before its transaction commits
 * MUTANT_6 safety: the end of a dead letter does not free its key
 * MUTANT_7 safety: a message waits although its key is free
 * MUTANT_8 safety: the removal of a dead letter makes no entry (a fault of ours)
 */
#define NOBODY 255
#define HEAD (parked[0] != none -> 0 : (parked[1] != none -> 1 : NOBODY)) /* they are stored in order */
#define INFINITE (HEAD != NOBODY && parked[HEAD] == dead)
mtype = { none, waits, dead };
mtype parked[2] = none;     /* the table of waiting messages */
bool stopped;               /* the row of the key */
byte turn;                  /* its next_at, which each claim changes */
bool due, alive;            /* it has passed; the process with the claim lives */
byte locked;                /* FOR NO KEY UPDATE, by a drain from 1 */
byte sharing, running;      /* FOR KEY SHARE: arrivals; parked messages that run */
byte entering[2];           /* the transaction that inserts the entry, from 1 */
bool entered[2], dropped[2]; /* removed by an operator, which makes an entry too */
byte unacked, owner;        /* the first message of the queue, and its consumer */
byte faults = 3;
inline unlock() { running--; locked = 0 }
inline die() { alive = alive && turn != mine }
inline operate(m) { /* a dead letter is replayed or removed; the removal waits for a copy that runs */
	if
	:: parked[m] = waits /* @replay */
	:: entering[m] == 0 -> parked[m] = none; dropped[m] = true; /* @remove */
#ifndef MUTANT_8
		entered[m] = true
#endif
	fi;
#ifndef MUTANT_6
	due = true;
#endif
	turn++ }
inline commit(m) { /* @commit: the entry and the effect */
	assert(!entered[m] && !dropped[m] && (m == 0 && !entered[1] || m == 1 && entered[0]));
	entered[m] = true; entering[m] = 0
}

proctype Consumer(byte me) {
	byte m;
	bool known;
end:	do
	:: atomic { owner == me && unacked < 2 -> m = unacked } /* @deliver */
again:	   known = stopped; /* the snapshot of the statement that makes the entry; it waits for another copy, then */
#ifdef MUTANT_4
	   known = false;
#endif
	   if
	   :: atomic { !known && entering[m] == 0 && !entered[m] -> entering[m] = me + 1 }
	      if
	      :: atomic { commit(m) }
	      :: atomic { faults > 0 -> faults--; entering[m] = 0 } /* the handler fails for the last time */
		 atomic { if /* @stop */
		 :: !entered[m] && parked[m] == none && !stopped -> stopped = true; due = false; turn++; parked[m] = dead
		 :: !entered[m] && parked[m] == none && stopped -> parked[m] = waits
		 :: else
		 fi }
	      fi
	   :: atomic { entered[m] && (known || entering[m] == 0) } /* a duplicate */
	   :: atomic { known && !entered[m] && parked[m] != none } /* a copy is stored */
	   :: atomic { known && !entered[m] && parked[m] == none && stopped -> sharing++ }
	      atomic { parked[m] = (parked[m] == none -> waits : parked[m]); sharing-- } /* @wait */
	   :: atomic { known && !entered[m] && parked[m] == none && !stopped ->
#ifdef MUTANT_7
		parked[m] = waits
#else
		goto again
#endif
		}
	   fi;
	   if
	   :: atomic { unacked = (owner == me && unacked == m -> m + 1 : unacked) } /* @ack */
	   :: atomic { faults > 0 -> faults-- } /* killed: the message is delivered again */
	   fi
	od
}

proctype Drain(byte me) {
	byte mine, m;
end:	do
	:: atomic { stopped && due && locked == 0 -> turn++; mine = turn; due = false; alive = true; m = HEAD } /* claim */
next:	   if
	   :: atomic { m == NOBODY && turn == mine && locked == 0 && HEAD == NOBODY -> locked = me } /* free: its snapshot is empty */
	      atomic { sharing == 0 -> /* it waits for arrivals */
#ifdef MUTANT_3
		stopped = false;
#else
		stopped = (HEAD != NOBODY); due = stopped; turn++;
#endif
		locked = 0 }
	   :: atomic { m == NOBODY && turn == mine && locked == 0 && HEAD != NOBODY -> due = true; turn++ }
#ifdef MUTANT_1
	   :: atomic { m != NOBODY && stopped && locked == 0 -> /* take */
#else
	   :: atomic { m != NOBODY && turn == mine && stopped && locked == 0 -> /* take */
#endif
#ifndef MUTANT_2
		locked = me;
#endif
		running++; assert(running == 1 && parked[m] == waits) }
#ifdef MUTANT_5
	      parked[m] = none;
#endif
	      if
	      :: atomic { entering[m] == 0 && entered[m] -> unlock() } /* a duplicate */
	      :: atomic { entering[m] == 0 && !entered[m] -> entering[m] = me + 2 }
		 if
		 :: atomic { commit(m); unlock() }
		 :: atomic { faults > 0 -> faults--; entering[m] = 0; unlock() } /* the handler fails: Fail or Retry */
		    atomic { if
		    :: turn == mine -> turn++; parked[m] = dead; due = false
		    :: turn == mine -> turn++; due = true
		    :: else
		    fi; goto end }
		 :: atomic { faults > 0 -> faults--; entering[m] = 0; unlock(); die(); goto end }
		 fi
	      fi;
	      if
	      :: atomic { turn == mine && locked == 0 -> parked[m] = none; turn++; mine = turn; due = false; m = HEAD; goto next }
	      :: atomic { faults > 0 -> faults--; die() }
	      :: turn != mine
	      fi
	   :: turn != mine
	   fi
	od
}

active proctype World() {
end:	do
	:: atomic { parked[0] == dead -> operate(0) }
	:: atomic { parked[1] == dead -> operate(1) }
	:: atomic { stopped && !due && !INFINITE && !alive -> due = true } /* the lease of a claim ends */
	:: atomic { stopped && !due && !INFINITE && alive && faults > 0 -> faults--; due = true }
	:: atomic { owner == 0 && faults > 0 -> faults--; owner = 1 } /* the queue moves */
	od
}
active proctype Monitor() { unacked == 2 && !stopped && HEAD == NOBODY && entered[0] && entered[1] }
init { atomic { run Consumer(0); run Consumer(1); run Drain(1); run Drain(2) } }
