// Package outboxkafka publishes outbox messages to Apache Kafka with franz-go.
//
//	client, err := kgo.NewClient(kgo.SeedBrokers("localhost:9092"), kgo.AllowIdempotentProduceCancellation())
//	publisher, err := outboxkafka.NewPublisher(client, outboxkafka.Config{Topic: "shop"})
//	relay, err := outbox.NewRelay(store, publisher, outbox.RelayConfig{})
//
// A message is one record. Its key is the ordering key; without one the client spreads the messages. The record has the
// body and these headers: holdfast-id, holdfast-name, content-type, holdfast-created-at, and the sender's headers under
// their own names. content-type is omitted for application/json, and holdfast-created-at if it differs by less than a
// second from the time in the id. With Config.Format content-type is always set. CloudEvents have headers ce_<attribute>,
// as their Kafka binding names them. The time stamp of the record is the time of sending, because Kafka deletes records
// by it.
//
// # Guarantees and limits
//
// A message counts as published when all in-sync replicas have its record (acks=all). With min.insync.replicas 1, the
// default, that can be the leader alone: set 2 or more. The producer is idempotent: the client's own retries store no
// copies. A message that the relay gives up and sends again may arrive twice, with the same holdfast-id.
//
// The relay sends the next message of a key after the confirm of the previous one, and Kafka keeps the order of a key
// in its partition. The order breaks when the number of partitions changes.
//
// Up to 1,000 messages may wait for a confirm at once. A record over the client's ProducerBatchMaxBytes (1,000,012 bytes
// by default) or the topic's max.message.bytes becomes a dead letter. Kafka rejects whole batches, so the publisher sends
// each message of a rejected batch again, alone.
//
// The tests run on kfake, the cluster of franz-go's own tests. No real broker was available; the module's README shows
// how to run them on one.
package outboxkafka
