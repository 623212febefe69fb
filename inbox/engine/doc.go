// Package engine is the consumer under every transport of the inbox: it receives messages from a driver.Source, runs a
// processor on them, and settles them by the results. It does everything that is not specific to a broker: workers,
// batches and order, retries and dead letters, the ledger, pauses while a server is down, and the shutdown. Transports
// wrap its Consumer in their own.
//
// # Goroutines
//
// One goroutine, the loop, owns all state and does no I/O. The other goroutines do I/O and own nothing. They post events
// to the loop, and the loop sends them work over channels.
//
//	receiver  opens sessions, receives deliveries and makes items of them   io.go    listen
//	loop      decides                                                       loop.go  run
//	workers   run the processor, and note runs in the ledger                work.go  run
//	acker     acknowledges and requeues                                     io.go    run
//	movers    store copies elsewhere, then acknowledge the originals        io.go    run
//	watcher   reports that a limit of time or memory is reached             work.go  watch
//	counter   counts dead letters while somebody reads the gauge            telemetry.go  depths.run
//
// In each turn the loop takes the waiting events, acts on what is due, starts jobs and commands the receiver. A step
// that finds "not yet" asks the alarm for a turn at the right time; no other timer exists. The parts of the loop
// (inflight, outage, acks, outgoing) are plain structs without locks, clocks or goroutines. They do not know each other:
// they return actions, and loop.do applies them.
//
// # The life of a message
//
// A message that succeeds passes through receiver.listen, loop.received, inflight.add, queues.ready, loop.start,
// queues.next, workers.run, loop.conclude, loop.succeeded, loop.do, loop.send and acker.run. The state of its item
// follows this diagram. inflight.to is its only writer, and in tests it panics at a transition that is not drawn here.
//
//	              ┌────────── queued ──────────┐  behind another message of its key
//	              │                            │
//	arrived ──────┼──────────▶ ready ◀─────────┼────────────────────────┐
//	   │ │        │            │   ▲           │                        │
//	   │ │        │    limited ◀┤  └ limited   │  its handler is busy   │
//	   │ │        │             ▼              │                        │
//	   │ │        │          running ──────────┼──▶ done                │  success: acknowledged
//	   │ │        │           │ │ │ ▲          │                        │
//	   │ │        │           │ │ │ └──────────┼─── orphaned ──▶ done   │  its session ended; the twin, if redelivered,
//	   │ │        │           │ │ └────────────┼──▶ orphaned            │  takes its place
//	   │ │        │           │ │              │                        │
//	   │ └────────┼───────────┼─┴─▶ suspected ─┼──▶ ready, outbound     │  a server was unreachable: whose failure was it?
//	   │          │           │                │                        │
//	   └──────────┴───────────┼───▶ delayed ◀──┘ ───────────────────────┘  waits in this process for its time
//	                          │      │    ▲
//	                          ▼      ▼    │
//	                         outbound ────┘ ──▶ done                       moved to the retries or to the dead letters
//
// Every state but done may also become done when the message is requeued: in a drain, after a pause, or because the
// broker would soon take it back. In ordered mode a message that the broker redelivers is lost first, and keeps its
// place until its session has ended. When a session ends, loop.ended drops all items but the running and the outbound
// ones. The complete table is drawn in inflight.go.
//
// A failed message: workers.run makes an outcome of the error (judge), loop.decide makes an action of the outcome, and
// loop.move chooses the way. In ordered mode it is delayed in this process and its key waits. Otherwise it is outbound:
// a mover stores the copy for the retry, then acknowledges the original, and loop.moved ends it. The copy arrives later
// as a new delivery with the next attempt.
//
// # Outages
//
// A message that failed because a server was unreachable is a suspect. outage.go draws the states of the pause, and says
// when a suspect is blamed.
//
// # Shutdown
//
// When ctx ends or a limit is reached, loop.finish begins the drain:
//
//  1. Nothing more starts. The receiver stops the deliveries, and the messages that have not started are requeued.
//  2. Running handlers finish, and their messages are settled. Then the receiver ends the session and leaves.
//  3. A tenth of ShutdownTimeout before its end, at most 6 s, the handlers are cancelled with inbox.ErrDraining.
//  4. Half of that later, handlers that ignore the cancellation are abandoned.
//  5. After ShutdownTimeout, Run returns in any case.
package engine
