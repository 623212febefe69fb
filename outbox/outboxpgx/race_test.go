//go:build race

package outboxpgx_test

func init() { raceEnabled = true }
