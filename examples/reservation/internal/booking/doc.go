// Package booking is the domain of the ticket shop: events with numbered seats,
// and reservations that hold seats for a while. It imports the standard library
// only and speaks to the world through the ports in ports.go.
//
// A reservation starts as held and ends as confirmed, cancelled or expired. A
// held one past its deadline counts as expired from that moment on, whether or
// not anything has written so yet: it cannot be confirmed, and its seats are
// open to the next buyer, whose hold then expires it in the same transaction.
//
// # Lock order
//
// A seat is given away once because every use case takes its locks in the same
// order: reservations first, by id, then seats, by number. A hold locks free
// seats only; whoever frees or confirms a seat holds the lock of the
// reservation it belongs to. So use cases wait for each other, never in a circle.
package booking
