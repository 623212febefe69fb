// Package postgres keeps the shop in Postgres: the ports of package booking on
// txretry transactions, with the outbox, the inbox, the idempotency records and
// the sweeper's claims in the same database.
//
// Business transactions are SERIALIZABLE. Those of one event also queue in
// process (txretry.Options.SerialKey), because they all want the same seats: a
// queue costs each buyer the time of those before it, where a crowd of
// serialization failures would cost all of them their attempts.
package postgres
