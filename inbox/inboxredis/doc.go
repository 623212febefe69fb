// Package inboxredis keeps copies of a message apart by a claim in Redis, around any
// inbox.Processor:
//
//	p, err := inboxredis.NewProcessor(client, mux, inboxredis.Config{Namespace: "billing"})
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
// FastPath is the form before inboxpgx: Redis may only say that a message is done, and what
// it does not know costs nothing but the question. Its keys are the same.
//
// While Redis cannot be reached no handler runs: the result is inbox.Unavailable, after 6 seconds
// at the latest, whatever the client's own timeouts are. A FastPath
// goes on without it, at the latest after Config.Timeout.
package inboxredis
