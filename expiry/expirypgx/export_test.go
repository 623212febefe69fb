package expirypgx

import "github.com/jackc/pgx/v5/pgxpool"

// PoolOf returns the pool of a Store.
func PoolOf(s *Store) *pgxpool.Pool { return s.pool }

// Listening returns nil while notifications arrive.
func Listening(s *Store) error { return s.listener.State() }

// Claim returns the first statement of a batch of 100 rows.
func Claim(s *Store) string { return limited(s.sql.claim, 100) }
