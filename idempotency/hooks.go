package idempotency

import (
	"context"
	"time"
)

// Hooks are optional callbacks for observation. They should return quickly.
type Hooks struct {
	// OnAcquired runs before the handler does.
	OnAcquired func(ctx context.Context, claim Claim)
	// OnLeaseLost runs when a running handler has lost its key, and has been
	// cancelled. It runs beside the handler.
	OnLeaseLost func(ctx context.Context, claim Claim)
	// OnDone runs once per request that needs a key or has one.
	OnDone func(ctx context.Context, d Done)
}

// Done describes a request that was answered.
type Done struct {
	// Key is empty if the request was refused before it was known, because of the
	// header, the body or the scope.
	Key    Key
	Result Result
	// Duration is that of the whole request, the handler included.
	Duration time.Duration
	// FellBack says that MiddlewareConfig.Fallback was asked in place of the store.
	FellBack bool
	// Err is why the request was refused, or its result not stored. nil: neither.
	Err error
}

// Result is how a request ended. It is the attribute result of the metrics.
type Result string

// The results of a request.
const (
	ResultCompleted     Result = "completed"          // the handler ran, its response is kept
	ResultReleased      Result = "released"           // the handler ran, the key is free again
	ResultTombstoned    Result = "tombstoned"         // the handler ran, its response cannot be kept
	ResultBypassed      Result = "bypassed"           // the handler ran without protection
	ResultLeaseLost     Result = "lease_lost"         // the handler ran, and the key was lost meanwhile
	ResultPersistFailed Result = "persist_failed"     // the handler ran, the store did not take the result
	ResultReplayed      Result = "replayed"           // answered from the record
	ResultInUse         Result = "in_use"             // refused: the key is being worked on
	ResultReused        Result = "reused"             // refused: the key of another request
	ResultUnavailable   Result = "result_unavailable" // refused: the record is a tombstone
	ResultStoreDown     Result = "store_unavailable"  // refused: the store could not be asked
	ResultInvalid       Result = "invalid"            // refused: no key, no scope or no body to work with
)

var results = []Result{
	ResultCompleted, ResultReleased, ResultTombstoned, ResultBypassed, ResultLeaseLost, ResultPersistFailed,
	ResultReplayed, ResultInUse, ResultReused, ResultUnavailable, ResultStoreDown, ResultInvalid,
}
