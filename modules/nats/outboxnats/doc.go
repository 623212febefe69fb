// Package outboxnats publishes outbox messages to NATS JetStream.
//
//	publisher, err := outboxnats.NewPublisher(conn, outboxnats.Config{Topic: "shop"})
//	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{})
//
// A message goes to the subject <topic>.<message name>, such as shop.order.placed. A stream must take the subjects
// shop.>; Setup of package inboxnats creates one. The id is in the header Nats-Msg-Id, the name in holdfast-name, the
// ordering key in holdfast-key, the content type in Content-Type; the sender's headers have their own names. Headers that
// NATS cannot carry are in holdfast-headers, a JSON object: those with a colon, a backslash, a space or a slash in their
// name, for example. CloudEvents have headers ce-<attribute>.
//
// # Guarantees and limits
//
// A message counts as published when a stream has acknowledged it. Up to 1,000 may wait for that at once. If a relay dies
// before it records the acknowledgement, the message is sent again, and the server drops the copy within the stream's
// duplicate window, 2 minutes by default. Later the consumer recognizes the copy by its id.
//
// A replayed dead letter of the outbox has the same Nats-Msg-Id as before. The server drops it only if the stream has the
// message already. Dead letters of a consumer return with another Nats-Msg-Id; see package inboxnats.
//
// nats-server writes to the operating system and syncs to the disk later (sync_interval, 2 minutes by default): it survives
// a kill, and a power failure only with replicas, or with sync_interval: always (2.10).
//
// The connection must reconnect forever (nats.MaxReconnects(-1)). A dead peer is detected after PingInterval times
// MaxPingsOutstanding, 4 minutes by default, and a peer that reads nothing holds up all calls for FlusherTimeout, a minute
// by default: set PingInterval and FlusherTimeout to some seconds.
//
// # Rights
//
// A user with limited rights needs to subscribe to _INBOX.>, or the connection's own inbox prefix, and to publish on these
// subjects, if the topic is shop:
//
//	Publish  shop.> $JS.API.STREAM.NAMES
//	Ready    $JS.API.INFO
//	Check    $JS.API.STREAM.INFO.*
package outboxnats
