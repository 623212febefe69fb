package idempotencyredis

import (
	"fmt"
	"net/http"
	"strconv"

	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/internal/headers"
)

// decodeOutcome reads the reply of begin.lua, or of look.lua: 1 when acquired, else a status and
// what is known.
func decodeOutcome(step string, reply any) (driver.BeginResult, error) {
	if reply == int64(1) {
		return driver.BeginResult{State: driver.Acquired}, nil
	}
	fields, _ := reply.([]any)
	field := func(i int) (string, bool) {
		if i >= len(fields) {
			return "", false
		}
		text, ok := fields[i].(string)
		return text, ok
	}
	state, _ := field(0)
	out := driver.BeginResult{Fingerprint: decodeFingerprint(field)}
	switch state {
	case "processing":
		left, _ := field(3)
		lease, err := milliseconds(left)
		if err != nil {
			return out, fmt.Errorf("idempotencyredis: %s: lease left: %w", step, err)
		}
		out.State, out.Lease = driver.InProgress, lease
		return out, nil
	case "completed":
		out.State, out.Response = driver.Completed, decodeResponse(field)
		return out, nil
	}
	return out, fmt.Errorf("idempotencyredis: %s: record has an unknown status: %w", step, driver.ErrForeignRecord)
}

func decodeFingerprint(field func(int) (string, bool)) driver.Fingerprint {
	version, _ := field(1)
	sum, _ := field(2)
	n, _ := strconv.Atoi(version) // an unreadable version is one that no request has
	return driver.Fingerprint{Version: n, Sum: sum}
}

// decodeResponse reads a completed record: ours, or one of a system that
// writes the body alone, into the field response. What cannot be read is a
// tombstone: the work was done.
func decodeResponse(field func(int) (string, bool)) driver.Response {
	code, ours := field(3)
	if !ours {
		body, ok := field(6)
		if !ok {
			return driver.Response{}
		}
		return driver.Response{
			Status: http.StatusOK,
			Header: http.Header{"Content-Type": {"application/json"}},
			Body:   []byte(body),
		}
	}
	status, err := strconv.Atoi(code)
	if err != nil {
		return driver.Response{}
	}
	hdr, _ := field(4)
	header, err := headers.Decode(hdr)
	if err != nil {
		return driver.Response{}
	}
	body, _ := field(5)
	return driver.Response{Status: status, Header: header, Body: []byte(body)}
}
