// Package engine is the consumer under every transport of the inbox: it receives messages from a driver.Source, runs a
// processor on them, and settles them by the results. It does everything that is not specific to a broker: workers,
// batches and order, retries and dead letters, the ledger, pauses while a server is down, and the shutdown. Transports
// wrap its Consumer in their own.
//
// # Goroutines
//
// One goroutine, the loop, owns all state and does no I/O. The other goroutines do I/O and own no message's state. They
// post events to the loop, and the loop sends them work over channels.
//
//	receiver  opens sessions, receives deliveries and makes items of them   io.go    run
//	loop      decides                                                       loop.go  run
//	workers   run the processor, and record runs in the ledger              work.go  run
//	acker     acknowledges and requeues                                     io.go    run
//	movers    store copies elsewhere, then acknowledge the originals        io.go    run
//	watcher   reports the end of ctx, and limits of time and memory         work.go  watchLimits
//	counter   counts dead letters while the gauge is read                   telemetry.go  depths.run
//
// The source, the pause of the processor and its background work have goroutines of their own.
//
// In each turn the loop takes the waiting events, acts on everything that is due, starts jobs, commands the receiver, and
// gives work to the acker and the movers. A step that finds "not yet" asks the alarm, the loop's only timer, for a turn.
// The parts of the loop (inflight, outage, acks, outgoing) are plain structs without locks, clocks or goroutines, and do
// not know each other. outage returns actions, which loop.do applies; the others return items.
//
// # The life of a message
//
// A message that succeeds passes through receiver.listen, loop.received, inflight.add, queues.ready, loop.start,
// queues.next, workers.run, loop.conclude, loop.succeeded, loop.do, loop.send (or loop.wait) and acker.run. inflight.to is
// the only writer of an item's state. In tests it panics at a transition that is not drawn here:
//
//	arrived ──▶ ready        the first of its key, or without one
//	arrived ──▶ queued       another message of its key is in flight
//	arrived ──▶ delayed      ordered: redelivered, and its attempt is not due yet
//	arrived ──▶ suspected    a probe looks for others
//	queued ──▶ ready         the message before it is done
//	queued ──▶ delayed       so, and its attempt is not due yet
//	ready ──▶ running        a worker takes it
//	ready ──▶ limited        its handler is busy
//	ready ──▶ outbound       too many wait for its handler: it is put off
//	limited ──▶ ready        its handler has time
//	running ──▶ ready        it must run in a call of its own, or with nothing beside it
//	running ──▶ suspected    a server was unreachable: other messages show who is at fault
//	running ──▶ delayed      ordered retry, or put off for a short time
//	running ──▶ outbound     it is retried or dead-lettered, or its ordered attempt is recorded in the ledger
//	running ──▶ orphaned     its session has ended
//	orphaned ──▶ running     its twin has arrived
//	suspected ──▶ ready      it is tried again
//	suspected ──▶ delayed    ordered: it is set aside, or at fault
//	suspected ──▶ outbound   it is set aside, or at fault
//	delayed ──▶ ready        its time has come
//	delayed ──▶ outbound     so, after its destination rejected it
//	outbound ──▶ delayed     its destination rejected it, or its ordered attempt is recorded
//	… ──▶ lost               running, suspected, outbound: the broker redelivers it; its key waits for the end of the session
//	… ──▶ done               all but arrived: acknowledged, requeued, moved, or dropped with its session
//
// Messages are requeued in a drain, when a pause begins, and before the broker would take them back. When a session ends,
// loop.ended drops all items except the ones with a worker or a mover.
//
// A failed message: the worker makes an outcome of the error, loop.decide makes an action of the outcome, and loop.move
// chooses one of four ways:
//
//   - unordered: outbound. A mover stores the copy for the retry or the dead letter, records it in the ledger, and
//     acknowledges the original unless the move has done that. The copy arrives later, as a new delivery.
//   - ordered retry: outbound until the attempt is recorded in the ledger, then delayed. The key waits.
//   - ordered dead letter: outbound, and the key continues. With ParkKeys the processor stops the key.
//   - put off for a few seconds: delayed.
//
// loop.conclude does not call decide for messages whose session has ended (loop.redelivered), and about batches that
// failed because a server was unreachable (loop.separate).
//
// # Outages
//
// A message that failed because a server was unreachable is a suspect. outage.go draws the states of the pause, and describes
// when a suspect counts as a failure.
//
// # Shutdown
//
// When ctx ends or a limit is reached, loop.finish begins the drain:
//
//  1. Nothing more starts. The receiver stops the deliveries, and the messages that have not started are requeued. Ordered
//     messages are requeued together, when the session ends.
//  2. Running handlers finish, and their messages are settled. Then the receiver ends the session and leaves.
//  3. A tenth of ShutdownTimeout before its end, at most 6 s, the handlers are cancelled with inbox.ErrDraining.
//  4. Half of that later, handlers that ignore the cancellation are abandoned.
//  5. After ShutdownTimeout, Run returns in any case.
package engine
