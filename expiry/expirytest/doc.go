// Package expirytest keeps rows that expire in memory, for unit tests and
// demonstrations without a database. Its [Store] takes the place of that of
// expirypgx, inside the transactions of txretrytest. [Prove] runs a sweep of yours on
// a real Postgres instead, once for each place at which it can be interrupted.
package expirytest
