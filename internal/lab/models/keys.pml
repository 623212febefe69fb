/* Keys: two clients send a request with one key until they have an answer. A process may die between any two steps.
 *
 * Abstracts, of idempotency: run.begin, fallBack, close (run.go), exchange.ask, serve, finish (middleware.go); of
 * idempotencypgx: Store.do, opening, resolve (run.go), table.Insert, Lookup, Resolve (records.go), alone and
 * claimingAtBegin (claims.go); of idempotencyredis: begin.lua, complete.lua, release.lua. The gate is a choice.
 * Leaves out: fingerprints, responses that are not kept, retention, claims in rows (Config.Lease), the retries of
 * txretry, and renewals: the lease of a living run may just end, and the run may notice it before COMMIT or not.
 *
 * PROPERTY safety: one effect, its answer for every client, one run at a time; NOT_COMMITTED only if nothing commits
 * MUTANT_1 safety: the record does not stop a second effect
 * MUTANT_2 safety: a failure is the answer, and nobody looks for the record of an earlier run
 * MUTANT_3 safety: after an unknown COMMIT a SELECT looks for the record; it does not wait
 * MUTANT_4 safety: the gate keeps the answer of a run whose COMMIT is unknown
 * MUTANT_5 safety: the claim of a dead process does not end
 * MUTANT_6 safety: without a gate nothing locks the key
 * MUTANT_7 safety: a release does not check the token
 * MUTANT_8 safety: the record is written after the effect has committed
 */
#define INSERTING (tx[0] == inserting || tx[1] == inserting || tx[2] == inserting || tx[3] == inserting)
#define NO_ANSWER 255

mtype = { idle, open, sent, inserting, committed, refused, free, processing, completed };
mtype tx[4] = idle;      /* transactions; each client has two, because one may outlive its run */
byte token[4];           /* of their runs */
bool orphan[4];          /* nobody waits for its end */
byte record, effects;    /* committed. The record is the token of its run, which stands for the answer, too */
byte lock;               /* the transaction with the advisory lock, from 1 */
bool gated;
mtype gate = free;
byte holder, kept, owner;   /* the token and the client of the claim; the kept answer */
bool alive;              /* the process of the claim lives */
bool working[2];         /* the handler of the client's request runs */
bool excused[2];         /* the run has lost its claim, or the gate is away: another may run beside it */
byte tokens, faults = 3;

inline end(t) { lock = (lock == t + 1 -> 0 : lock); tx[t] = idle; token[t] = 0; orphan[t] = false }

proctype Transaction(byte t) { /* at the server, after COMMIT is on its way */
end1:	do
	:: atomic { tx[t] == sent && record == 0 && !INSERTING -> tx[t] = inserting }
	:: atomic { tx[t] == sent && record != 0 ->
#ifdef MUTANT_1
		tx[t] = inserting
#else
		if :: orphan[t] -> end(t) :: else -> tx[t] = refused fi
#endif
		}
	:: atomic { tx[t] == inserting -> effects++; /* @commit */
#ifndef MUTANT_8
		record = token[t];
#endif
		if :: orphan[t] -> end(t) :: else -> tx[t] = committed fi }
	:: atomic { orphan[t] -> end(t) } /* rolled back: the connection is gone */
	od
}

inline leave(saved) { /* close: complete or release the claim */
	if
	:: saved && gate == processing && holder == tok -> gate = completed; kept = saved; holder = 0 /* @keep */
#ifdef MUTANT_7
	:: !saved && gate == processing -> gate = free; holder = 0
#else
	:: !saved && gate == processing && holder == tok -> gate = free; holder = 0 /* @release */
#endif
	:: else
	fi
}

inline die() {
	faults--; orphan[t] = tx[t] != idle; working[c] = false; answer = 0;
	if :: gate == processing && holder == tok -> alive = false :: else fi;
	goto again
}

proctype Client(byte c) {
	byte t, tok, answer;
again:	atomic { excused[c] = false; t = 2 * c; tok = 0 }
	if
	:: atomic { !gated -> tokens++; tok = tokens }
	:: atomic { gated && gate == completed -> answer = kept; goto done } /* @replay */
	:: atomic { gated && gate == free -> tokens++; tok = tokens; gate = processing; holder = tok; owner = c; alive = true } /* @claim */
	:: atomic { gated && faults > 0 -> faults--; excused[c] = true; tokens++; tok = tokens } /* the records decide */
	fi;
	atomic { tx[t] == idle || tx[t + 1] == idle -> t = (tx[t] == idle -> t : t + 1); tx[t] = open; token[t] = tok; /* BEGIN; without a gate it looks */
		if :: !gated && record -> end(t); answer = record; goto done :: else fi }
#ifndef MUTANT_6
	atomic { if
		:: !gated && lock == 0 -> lock = t + 1
		:: !gated && lock != 0 -> end(t); lock == 0; goto again /* 409 */
		:: gated
		fi }
#endif
	atomic { assert(!working[1 - c] || excused[c] || excused[1 - c]); working[c] = true }
	if
	:: atomic { faults > 0 -> die() }
	:: atomic { holder != tok && gated -> working[c] = false; end(t); goto again } /* the lease is lost */
	:: atomic { effects > 0 -> /* the handler fails: its effect is there already */
		working[c] = false; end(t);
#ifdef MUTANT_2
		answer = NO_ANSWER
#else
		answer = record
#endif
		}
	:: atomic { effects == 0 -> tx[t] = sent }
	   if
	   :: atomic { tx[t] == committed -> end(t); working[c] = false; answer = tok }
#ifdef MUTANT_8
	      if :: record = tok :: atomic { faults > 0 -> die() } fi
#endif
	   :: atomic { tx[t] == refused -> end(t); working[c] = false; answer = record } /* @look */
	   :: atomic { faults > 0 -> die() }
	   :: atomic { faults > 0 -> faults--; orphan[t] = true; working[c] = false } /* COMMIT is not answered */
	      if
	      :: atomic { record != 0 -> answer = record }
#ifdef MUTANT_3
	      :: atomic { record == 0 -> assert(!INSERTING) }
#else
	      :: atomic { record == 0 && !INSERTING } /* NOT_COMMITTED */
#endif
	      :: atomic { record == 0 && INSERTING } /* still unknown, after some time */
	      fi
	   fi
	fi;
#ifdef MUTANT_4
	atomic { if :: answer == 0 -> leave(NO_ANSWER) :: else -> leave(answer) fi }
#else
	atomic { leave(answer) }
#endif
	if
	:: atomic { faults > 0 -> die() }
	:: answer == 0 -> goto again
	:: answer != 0
	fi;
done:	assert(answer == record && effects == 1) /* @answer */
}

active proctype Redis() {
	if :: gated = true :: gated = false fi;
	atomic { run Client(0); run Client(1); run Transaction(0); run Transaction(1); run Transaction(2); run Transaction(3) }
end1:	do
#ifndef MUTANT_5
	:: atomic { gate == processing && !alive -> gate = free; holder = 0 }
#endif
	:: atomic { faults > 0 && gate == processing -> faults--; gate = free; holder = 0; excused[owner] = true } /* the lease */
	:: atomic { faults > 0 && gate == completed -> faults--; gate = free } /* Redis forgets */
	od
}
