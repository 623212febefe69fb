package driver

import (
	"log/slog"

	"github.com/holdfast-go/holdfast/idempotency/internal/keys"
)

// Key is an idempotency.Key, which is at most 195 bytes long. It logs as a short hash.
type Key string

// Validate returns ErrKeyInvalid unless k is safe in the name of a record.
func (k Key) Validate() error {
	if !keys.Valid(string(k)) {
		return ErrKeyInvalid
	}
	return nil
}

// LogValue keeps keys out of logs: whoever knows a key can ask for its answer.
func (k Key) LogValue() slog.Value { return slog.StringValue(keys.Hash(string(k))) }
