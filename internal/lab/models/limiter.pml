/* The leased limiter: a process takes units of a limit ahead from the store, and spends them in memory.
 *
 * Abstracts, of ratelimit: Leased.spend, ask, settle, release, sweep and giveBack, lease.spendable, learn and add
 * (leased.go), on a FixedWindow. Two calls and a sweep run at the same time. Other processes charge the store.
 * Leaves out: several limits in one call, the size of the units ahead (always Max / Share), a lease without room, the
 * sliding window, a store that loses its memory, and clocks: a process may spend until the store's window ends, as its own clock is ahead.
 *
 * PROPERTY safety: no window admits more than its limit; a process that dies loses no more than two shares, and the
 * charges of its calls; without faults each unit is spent or refunded
 * MUTANT_1 safety: a lease is spent after its window
 * MUTANT_2 safety: a call mixes units of two windows
 * MUTANT_3 safety: a refund without an answer is sent again
 * MUTANT_4 safety: a call without an answer counts as charged
 * MUTANT_5 safety: refunded units stay in the lease
 * MUTANT_6 safety: units stay in a lease that moves to another window
 * MUTANT_7 safety: two calls may take units ahead at the same time
 * MUTANT_8 safety: an admitted call does not take its units from the lease
 */
#define MAX 3
#define SHARE 1 /* Max / Share of the code: units ahead, and in a lease */
#define MIN(a, b) (a < b -> a : b)

byte count[2], spent[2], window; /* at the store, by window */
byte units, since;               /* the lease: units of a window */
byte flying;                     /* taken ahead by running calls */
bool taking, dead, faulty;
byte calls = 3, callers = 2, running = 3, others = 1, faults = 1;

inline admit(w, n) {
	spent[w] = spent[w] + n;
	assert(spent[w] <= MAX && spent[w] <= count[w])
}
inline fault() { faults--; faulty = true }
inline back(n, w) { assert(count[w] >= n); count[w] = count[w] - n }
inline refund(n, w) { /* giveBack, which is not repeated */
	atomic { if
	:: n > 0 && !dead -> back(n, w)
	:: n > 0 && !dead && faults > 0 -> fault() /* it is lost */
	:: n > 0 && !dead && faults > 0 -> fault(); back(n, w); /* its answer is lost */
#ifdef MUTANT_3
		back(n, w)
#endif
	:: else
	fi;
	n = 0 }
}
inline release(n, w) { /* add: units of another window stay in n and are refunded */
	if :: since == w -> units = units + n; n = 0 :: else fi
}

proctype Caller() {
	byte cost, part, ahead, from, at, old, oldFrom;
	bool takes, allowed, answered, crossed;
	do
	:: atomic { calls == 0 || dead -> break }
	:: atomic { calls > 0 && !dead -> calls--;
		if :: cost = 1 :: cost = 2 fi;
		from = since;
#ifdef MUTANT_1
		part = MIN(units, cost);
#else
		part = (from == window -> MIN(units, cost) : 0);
#endif
#ifndef MUTANT_8
		units = units - part;
#endif
		if
		:: part == cost -> admit(window, cost); goto next /* spend */
#ifdef MUTANT_7
		:: part < cost -> takes = true; ahead = SHARE
#else
		:: part < cost && !taking -> takes = true; taking = true; ahead = SHARE
#endif
		:: part < cost && taking
		fi;
		flying = flying + ahead }
ask:	   atomic { at = window; allowed = count[at] + cost - part + ahead <= MAX; /* the store decides */
		if
		:: count[at] = (allowed -> count[at] + cost - part + ahead : count[at]); answered = true
		:: faults > 0 -> fault(); count[at] = (allowed -> count[at] + cost - part + ahead : count[at]) /* no answer */
		:: faults > 0 -> fault() /* the question is lost */
		fi }
	   atomic { if
		:: dead -> break
		:: !dead && answered && !allowed && ahead > 0 -> flying = flying - ahead; ahead = 0; answered = false; goto ask
		:: else
		fi;
#ifdef MUTANT_4
		answered = true;
#endif
		flying = flying - ahead; taking = taking && !takes; takes = false;
#ifndef MUTANT_2
		crossed = answered && allowed && part > 0 && at != from;
#endif
		if
		:: crossed -> old = cost - part + ahead; oldFrom = at; ahead = 0
		:: !crossed && answered && since != at -> /* learn */
#ifndef MUTANT_6
			old = units; oldFrom = since; units = 0;
#endif
			since = at
		:: else
		fi;
		if
		:: answered && allowed && !crossed -> admit(at, cost); part = 0; release(ahead, at); assert(ahead == 0)
		:: else -> ahead = 0; release(part, from)
		fi }
	   refund(old, oldFrom);
	   refund(part, from);
	   atomic { answered = false; allowed = false;
		if :: crossed && !dead -> crossed = false; goto ask :: else fi }
next:	   atomic { crossed = false; cost = 0; part = 0; from = 0; at = 0; oldFrom = 0 }
	od;
	atomic { callers--; running-- }
}

active proctype Sweeper() {
	byte n, w;
	do
	:: atomic { units > 0 && !dead -> n = units; w = since;
#ifndef MUTANT_5
		units = 0
#endif
		}
	   refund(n, w)
	:: atomic { dead || callers == 0 && units == 0 -> break }
	od;
	running--
}

active proctype World() {
	do
	:: atomic { window == 0 -> window = 1 }
	:: atomic { others > 0 && count[window] < MAX -> others--; count[window]++; admit(window, 1) }
	:: atomic { faults > 0 && !dead && running > 0 -> assert(units + flying <= 2 * SHARE); fault(); dead = true; units = 0 }
	:: atomic { running == 0 -> break }
	od;
	assert(faulty || count[0] == spent[0] && count[1] == spent[1])
}

init { atomic { run Caller(); run Caller() } }
