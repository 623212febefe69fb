// Package idempotencyredis keeps idempotency records in Redis.
//
// # Layout
//
//	idempotency:{key}       hash    status token fpv fp code hdr body created
//	idempotency:lock:{key}  string  token of the run that holds the key
//
// The braces stand for the key here; they are written literally only where a
// cluster needs them as a hash tag (see Config.HashTag). A key of
// idempotency.GlobalScope is its 32 hex digits, or ~ and a SHA-256 for an opaque
// one; one of another scope has that after @scope: instead.
//
// The lock is set only where there is none, for 30 s, together with a hash whose
// status is processing and which ends with it. In the step that deletes the lock
// status becomes completed, and the hash stays for 48 h: fpv and fp are the
// fingerprint's version and sum, code the HTTP status (0: a tombstone), hdr the
// headers as a JSON object of lists (a value that is not UTF-8 is {"base64": …}),
// body the body as it is, created the time of the claim in Unix milliseconds of the
// claimant's clock, for people to read.
//
// Each transition (begin, extend, complete, release) is one script and one round
// trip: two for a first run, one for a replay. All but begin do nothing unless
// the lock holds the caller's token. Calls that come while several trips are
// under way share the next one; on a cluster each goes by itself.
//
// # Other systems
//
// A hash with only status=completed and response, as other systems write it, is
// replayed as a JSON body with status 200, whatever the request; with
// Config.WriteResponse such systems can read ours, too. A hash with
// status=processing counts only while there is a lock, and tells the fingerprint
// while the lock holds its token; a lock without an end gets one. A hash with any
// other status is left alone: beginning its key is an error. An answer that such a
// system writes while we hold the lock stays: our run finds that it lost the lease.
//
// # Silence
//
// No call waits longer than 6 s, or its context, whatever the client's own timeouts
// are. A script that is not answered within 2 s is sent again, up to three times, on
// another connection, for it may run again; meanwhile the idle connections are
// tested, so that those which a router has forgotten do not each cost somebody the
// 2 s. When five tries in a row have failed, Begin leaves the server alone but for one
// try a second; on a cluster and a ring it does not, for a node that is down says
// nothing about the others.
//
// # Limits
//
// Of a record whose headers, body, response or code have more than 64 MiB nothing is read but
// that it exists: it is a tombstone.
//
// Redis loses what it did not replicate or write to disk in time, and a lost
// record lets the key run again. Use maxmemory-policy noeviction (Check tells),
// and idempotencypgx behind it where that must not happen.
//
// A Release whose answer was lost, and which the client sends again, reports
// ErrLeaseLost: the key is free all the same.
package idempotencyredis
