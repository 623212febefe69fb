// Package expirytest keeps rows that expire in memory, for unit tests and
// demonstrations without a database. Its [Store] takes the place of that of
// expirypgx, inside the transactions of txretrytest.
package expirytest
