// Package databasesql shows a shop on database/sql: orders are written with GORM and billed with code that
// sqlc has generated, and the promises are those of pgx. The guide is in examples/guides/databasesql.md.
package databasesql
