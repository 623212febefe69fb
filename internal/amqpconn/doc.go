// Package amqpconn is what the RabbitMQ adapters share: connections that are
// replaced instead of repaired, and a pipelined publisher on top of them.
//
// The client's own recovery reopens the same channel object, whose delivery
// tags start again at 1: a late acknowledgement of an old delivery then settles
// a new message nobody has processed. So a connection here lives for one
// session. When anything about it breaks, all of it is thrown away and a new
// one is dialled (Loop).
//
// One thing does not count as broken: RabbitMQ closes the channel of a message
// that it refuses, because of the exchange, the topic or the size, and with it
// loses track of every other message on that channel. The publisher opens
// another channel, publishes those messages once more, and blames the message
// that the broker's reply names. If it names none, they are published one by one.
//
// The client's calls wait for the broker without a limit. Every call that waits
// goes through Conn.Within, which closes the connection when it takes too long.
// Where nothing waits, Conn.Watch finds out that the broker has vanished.
package amqpconn
