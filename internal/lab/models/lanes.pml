/* Lanes: two relays lease one lane with two messages of a key. A lease may end while its holder believes in it.
 *
 * Abstracts, of outbox: rounds.run, publish, settle and renew (round.go), pipeline.take (pipeline.go), dispatcher.next
 * and idle (dispatcher.go); of outbox/outboxpgx: Store.take, lostClaims (claim.go), Settle, Renew (settle.go), and
 * claim, settle and look of 0006_outbox_relay.sql. A settlement may arrive after its relay has given it up. A crash of
 * the server may undo a claim, because its commit does not wait for the disk.
 * Leaves out: floors (floors.pml), messages that wait for a retry, suspects and their quarantine, several rounds of one
 * relay, and polls as long as no fault has happened, because wake-ups must suffice.
 *
 * PROPERTY safety: only the last claim changes a lane; only published or rejected rows go; the key keeps its order
 * PROPERTY progress: every message is published or rejected, after one fault at most
 * MUTANT_1 safety: a settlement does not check the token
 * MUTANT_2 safety: the token is the relay's, not the claim's
 * MUTANT_3 safety: a renewal does not check the token
 * MUTANT_4 safety: a claim takes a lane whose lease has not ended
 * MUTANT_5 safety: the second message does not wait for the confirm of the first one
 * MUTANT_6 safety: a relay does not look for more after a settlement, and a wake-up is lost
 * MUTANT_7 safety: a settlement removes the whole batch
 * MUTANT_8 progress: a rejected message is sent again at once, for ever
 */
#define WORK (row[0] == ready || row[1] == ready)
#define DONE (row[0] == gone && row[1] == gone)
#define FREE (token == 0 || expired)

#ifndef FAULTS
#define FAULTS 2
#endif

mtype = { none, ready, gone };
mtype row[2] = none;
bool sent[2], rejected[2];           /* the broker's answer */
byte token;                          /* of the lane; 0: free */
bool expired;                        /* its lease has ended */
byte claims, newest;                 /* the number of claims; the last one that leased the lane */
bool wake[2], polls;
byte lost[2];                        /* the token of a claim without an answer */
byte mine[2];                        /* the token of a relay's round; 0: none */
bool over[2];                        /* its lease has ended once; the relay may not know */
byte lateToken, lateClaim, lateRows; /* a settlement on its way */
byte faults = FAULTS;

inline fault() { faults--; polls = true }

inline settle(t, c, rows) { /* @settle */
	if
#ifdef MUTANT_1
	:: token != 0 ->
#else
	:: token != 0 && token == t ->
#endif
		assert(newest == c);
		if :: rows & 1 -> row[0] = gone; assert(sent[0] || rejected[0]) :: else fi;
		if :: rows & 2 -> row[1] = gone; assert(sent[1] || rejected[1]) :: else fi;
		token = 0; expired = false
	:: else
	fi
}

proctype Relay(byte me) {
	byte claim, batch, outcomes;
	bool more, held;
end:	do
	:: atomic { wake[me] || more || polls && FREE && WORK -> wake[me] = false; more = false;
		if :: lost[me] && token == lost[me] -> token = 0; expired = false :: else fi;
		lost[me] = 0 }
	   atomic { /* @claim; the relay may not get the answer */
		if
#ifdef MUTANT_4
		:: WORK ->
#else
		:: FREE && WORK ->
#endif
			claims++; newest = claims; expired = false;
			token = claims;
#ifdef MUTANT_2
			token = me + 1;
#endif
			if
			:: mine[me] = token; claim = claims; over[me] = false;
				batch = (row[0] == ready -> 1 : 0) + (row[1] == ready -> 2 : 0);
				held = true
			:: faults > 0 -> fault(); lost[me] = token
			fi
		:: else
		fi }
	   do
	   :: atomic { mine[me] && held && (batch & 1) && !(outcomes & 1) -> assert(newest == claim || over[me]); /* @publish, then @confirm */
		outcomes = outcomes | 1;
		if :: sent[0] = true :: rejected[0] = true fi }
#ifdef MUTANT_5
	   :: atomic { mine[me] && held && (batch & 2) && !(outcomes & 2) ->
#else
	   :: atomic { mine[me] && held && (batch & 2) && !(outcomes & 2) && (outcomes & 1 || !(batch & 1)) ->
#endif
		assert(newest == claim || over[me]); assert(sent[0] || rejected[0]);
#ifdef MUTANT_8
		if :: sent[1] = true; outcomes = outcomes | 2 :: true fi }
#else
		if :: sent[1] = true :: rejected[1] = true fi; outcomes = outcomes | 2 }
#endif
	   :: atomic { mine[me] && held && (expired || token != mine[me]) -> /* @renew */
		if
#ifdef MUTANT_3
		:: true -> expired = false; over[me] = false; assert(newest == claim)
#else
		:: token == mine[me] -> expired = false
#endif
		:: else -> held = false
		fi }
	   :: atomic { mine[me] && held && faults > 0 -> fault(); held = false } /* out of time, or the broker is away */
	   :: atomic { mine[me] && (!held || outcomes == batch) ->
		more = outcomes != batch;
#ifdef MUTANT_7
		outcomes = batch;
#endif
		if
		:: settle(mine[me], claim, outcomes)
		:: lateToken == 0 && faults > 0 -> fault(); lateToken = mine[me]; lateClaim = claim; lateRows = outcomes
		fi;
		mine[me] = 0 }
#ifndef MUTANT_6
	      more = more || WORK /* look, after the commit */
#endif
	   :: atomic { mine[me] && faults > 0 -> fault(); mine[me] = 0 } /* killed */
	   :: !mine[me] -> break
	   od;
	   atomic { batch = 0; outcomes = 0; claim = 0; held = false }
	od
}

active proctype Writer() { /* @commit: each message wakes one relay */
	row[0] = ready; if :: wake[0] = true :: wake[1] = true fi;
	row[1] = ready; if :: wake[0] = true :: wake[1] = true fi
}

active proctype Server() {
end:	do
	:: atomic { token != 0 && !expired && (faults > 0 || mine[0] != token && mine[1] != token) -> /* @expire: the lease ends */
		if :: mine[0] == token || mine[1] == token -> faults-- :: else fi;
		expired = true; polls = true; over[0] = over[0] || mine[0] == token; over[1] = over[1] || mine[1] == token }
	:: atomic { token != 0 && faults > 0 -> fault(); over[0] = over[0] || mine[0] == token; over[1] = over[1] || mine[1] == token;
		token = 0; expired = false } /* a crash undoes the claim */
	:: atomic { lateToken != 0 -> settle(lateToken, lateClaim, lateRows); lateToken = 0; lateClaim = 0; lateRows = 0 }
	od
}

active proctype Monitor() { DONE }
init { atomic { run Relay(0); run Relay(1) } }
ltl progress { <> DONE }
