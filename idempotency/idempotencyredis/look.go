package idempotencyredis

import (
	"context"
	_ "embed"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/idempotency/driver"
)

var (
	//go:embed look.lua
	lookText   string
	lookScript = newScript(lookText)
)

// Look implements driver.Looker.
func (s *Store) Look(ctx context.Context, key driver.Key) (driver.Known, error) {
	if err := key.Validate(); err != nil {
		return driver.Known{}, err
	}
	reply, err := s.run(ctx, false, lookScript, driver.Claim{Key: key})
	if err != nil {
		return driver.Known{}, explain("look", err)
	}
	return decodeKnown(reply)
}

// decodeKnown reads the reply of look.lua.
func decodeKnown(reply any) (driver.Known, error) {
	fields, _ := reply.([]any)
	if len(fields) > 0 && fields[0] == "free" {
		return driver.Known{}, nil
	}
	out, err := decodeOutcome("look", reply)
	if err != nil {
		return driver.Known{}, err
	}
	known := driver.Known{State: out.State, Fingerprint: out.Fingerprint, Response: out.Response}
	if len(fields) < 9 {
		return known, nil
	}
	text, _ := fields[7].(string)
	if created, err := strconv.ParseInt(text, 10, 64); err == nil { // another system does not tell
		known.Since = time.UnixMilli(created)
	}
	if left, ok := fields[8].(int64); ok { // less than 0: it has no end
		known.Left = time.Duration(max(0, left)) * time.Millisecond
	}
	return known, nil
}
