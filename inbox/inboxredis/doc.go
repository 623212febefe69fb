// Package inboxredis keeps copies of a message apart by a claim in Redis, around any
// inbox.Processor:
//
//	p, err := inboxredis.NewProcessor(client, mux, inboxredis.ProcessorConfig{Namespace: "billing"})
//
// # How it works
//
// The key of a message is outbox:processed:<message id>, or
// outbox:processed:<namespace>:<message id> when there is a namespace. Consumers that share a
// Redis must have different ones, or they take each other's messages for processed. Before
// the handler the key is claimed (SET NX, value processing:<token>) with a short lease that is
// prolonged while the handler runs. After it the key becomes done:<token> for 8 days, or is
// removed when the handler failed, so that a retry may claim it. A token, new for each
// delivery, keeps a holder that lost its claim from removing that of another.
//
// A message whose key says done is skipped and counts as done. So does one whose key holds
// something else than this package writes, such as a set or another text: that is how other
// systems note what they have processed. A message that is claimed by another delivery is
// postponed, never acknowledged: if the other one dies its claim runs out.
//
// # Guarantees, and what is missing
//
// Best effort. Effect and mark are not atomic: when the process or Redis dies between the
// handler's success and the mark, or when the lease runs out under a handler that was
// stopped for so long, a copy runs the handler again. When Redis loses its data, or evicts
// keys (use maxmemory-policy noeviction), copies are not recognised. No message is lost
// through any of these. A handler that must take effect once belongs to inboxpgx.
//
// # Before inboxpgx
//
// Where the next processor deduplicates by itself, as *inboxpgx.Store does, nothing is claimed.
// Redis is asked first and believed only when it says that a message is done; everything else is
// for the next processor, whose guarantees stay. That saves transactions where many copies come.
// The keys are the same. A consumer also gets the ledger and the pruning of the next processor.
//
// # Without Redis
//
// While Redis cannot be reached no handler runs: the result is inbox.Unavailable, after 6 seconds
// at the latest, whatever the client's own timeouts are. Before inboxpgx messages go on without
// it, after 100 ms at the latest.
package inboxredis
