/* Order: why one message of a key is in flight at a time. A relay publishes three messages of a key on one channel. The
 * broker stores or rejects each of them by itself: a quorum queue that rejects a message, because it is full or has no
 * leader for a moment, stores the next one of the same channel. A message that was rejected, or had no answer when the
 * connection was lost, is published again. So with two in flight, the second may be stored before the first.
 *
 * Abstracts, of outbox: pipeline.take and the outcomes (pipeline.go); of internal/amqpconn: window.go and the end of a
 * connection (conn.go). The broker answers in any order, and its answer may be lost after it stored the message.
 * Leaves out: leases (lanes.pml), messages that are given up, and brokers that drop the rest of a channel after a
 * rejection. With such a broker, and only then, several messages of a key could be in flight.
 *
 * PROPERTY safety: the first copies of a key's messages are stored in order; a message with a confirm is stored
 * PROPERTY progress: every message is stored, after three faults at most
 * MUTANT_1 safety: two messages of the key are in flight
 * MUTANT_2 safety: two are in flight, and nothing more leaves after a rejection
 * MUTANT_3 safety: the next message follows one without an answer when the connection is lost
 * MUTANT_4 safety: a rejection counts as a confirm
 * MUTANT_5 progress: a rejected message is not published again
 */
#define MESSAGES 3
#define DONE (confirmed == 7)
#define BIT(m) (1 << (m))

#if defined(MUTANT_1) || defined(MUTANT_2)
#define WINDOW 2
#else
#define WINDOW 1
#endif

chan wire = [WINDOW] of { byte };
byte stored, confirmed;              /* sets of messages; the relay knows the second */
byte flying, flights;                /* published without an answer, and their number */
byte acks, nacks;                    /* answers on their way */
byte failed;                         /* rejected: published again later */
byte faults = 3;

/* every message before m is confirmed or in flight */
#define FOLLOWS(m) (((confirmed | flying) & (BIT(m) - 1)) == BIT(m) - 1)
#define LEAVES(m) (!((confirmed | flying) & BIT(m)) && FOLLOWS(m) && flights < WINDOW && MAY(m))
#if defined(MUTANT_2)
#define MAY(m) (!failed || (failed & BIT(m)))
#elif defined(MUTANT_5)
#define MAY(m) (!(failed & BIT(m)))
#else
#define MAY(m) true
#endif

inline answered(m) { flying = flying & ~BIT(m); flights-- }
inline confirm(m) { confirmed = confirmed | BIT(m); assert(stored & BIT(m)) }

#define STEPS(m) \
	:: atomic { LEAVES(m) -> flying = flying | BIT(m); flights++; failed = failed & ~BIT(m); wire ! m } \
	:: atomic { acks & BIT(m) -> acks = acks & ~BIT(m); answered(m); confirm(m) } \
	:: atomic { nacks & BIT(m) -> nacks = nacks & ~BIT(m); answered(m); failed = failed | BIT(m); REJECTED(m) }
#ifdef MUTANT_4
#define REJECTED(m) confirm(m)
#else
#define REJECTED(m) skip
#endif

active proctype Relay() {
end:	do STEPS(0) STEPS(1) STEPS(2) od
}

active proctype Broker() {
	byte m;
end:	do
	:: atomic { wire ? m ->
		if
		:: assert(m == 0 || stored & BIT(m - 1)); stored = stored | BIT(m); acks = acks | BIT(m)
		:: faults > 0 -> faults--; nacks = nacks | BIT(m)
		fi }
	:: atomic { flights > 0 && faults > 0 -> faults--; /* the connection is lost, with everything on it */
		do :: wire ? m :: empty(wire) -> break od;
#ifdef MUTANT_3
		confirmed = confirmed | flying;
#endif
		acks = 0; nacks = 0; flying = 0; flights = 0 }
	od
}

active proctype Monitor() { DONE }
ltl progress { <> DONE }
