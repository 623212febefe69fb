// Package idempotencyredis keeps idempotency records in Redis.
//
// # Layout
//
//	idempotency:{key}       hash    status token fpv fp code hdr body created
//	idempotency:lock:{key}  string  token of the run that holds the key
//
// The braces mark the key here. They are written literally only if a cluster needs them as a hash
// tag (see Config.HashTag). In idempotency.GlobalScope a key is its 32 hex digits, or ~ and a
// SHA-256 for an opaque key. In another scope, @scope: precedes this.
//
// The lock is set only if there is none, for 30 s, together with a hash whose status is processing
// and which expires with the lock. The step that deletes the lock changes the status to completed,
// and the hash stays for 48 h. fpv and fp are the version and sum of the fingerprint, code is the
// HTTP status (0: a tombstone), hdr has the headers as a JSON object of lists (a value that is not
// UTF-8 is {"base64": …}), and body has the body unchanged. created is the time of the claim in
// Unix milliseconds, by the clock of the claiming process, for people to read.
//
// Each transition (begin, extend, complete, release) is one script and one round trip: two for a
// first run, one for a replay. All scripts except begin do nothing unless the lock holds the
// caller's token. Calls that arrive while several round trips are running share the next one; on a
// cluster each call has its own.
//
// # Other systems
//
// A hash with only status=completed and response, as other systems write it, is replayed as a JSON
// body with status 200, whatever the request. With Config.WriteResponse such systems can also read
// the records of this package. A hash with status=processing counts only while there is a lock. Its
// fingerprint counts only while the lock holds its token. A lock without an expiry gets one. A hash
// with any other status is not changed, and Begin of its key is an error. If another system writes
// an answer while a run holds the lock, that answer stays, and the run gets ErrLeaseLost.
//
// # Timeouts
//
// No call waits longer than 6 s or its context, whatever the client's own timeouts are. A script
// without an answer within 2 s is sent again, up to three times, on another connection, because
// every script may run again. Meanwhile the idle connections are tested, so that connections
// forgotten by a router do not each cost a caller 2 s. After five failed tries in a row, Begin uses
// the server only once a second. On a cluster and a ring it does not, because one node that is down
// does not show that the others are down.
//
// # Limits
//
// If headers, body, response or code of a record have more than 64 MiB, the record is read as a
// tombstone.
//
// Redis loses writes that it did not replicate or write to disk in time, and a lost record lets the
// key run again. Use maxmemory-policy noeviction (see Check), and put idempotencypgx behind it if
// that must not happen.
//
// If the answer to a Release was lost and the client sends the Release again, it returns
// ErrLeaseLost, although the key is free.
package idempotencyredis
