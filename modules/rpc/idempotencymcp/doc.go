// Package idempotencymcp lets a tool call of the Model Context Protocol with an idempotency key take effect once.
// Repeated calls get the same result. It is a middleware for servers of the official Go SDK.
//
//	user := func(req *mcp.CallToolRequest) (string, error) { return req.Extra.TokenInfo.UserID, nil }
//	writes := func(tool string) bool { return tool == "place_order" }
//	once, err := idempotencymcp.New(store, user, writes, idempotency.MiddlewareConfig{ParseKey: idempotency.ParseOpaque})
//	server.AddReceivingMiddleware(authenticate, once)
//
// The key is the argument idempotency_key, which a model can fill in if the input schema of the tool has it, or the
// entry io.github.holdfast-go/idempotency-key of _meta, which a client can set. The protocol has no field for it.
// Two calls are the same if tool and arguments are equal, apart from the key, white space and the order of members.
//
// The middleware of package idempotency decides. The functions of its configuration see a call as an HTTP request: POST,
// the path /tool, and the header of the transport. Lifetimes, leases, settings, logs and metrics are the same.
//
// # Errors
//
// A refusal is a tool error, so that a model can read it and act on it: a text such as "IDEMPOTENCY_KEY_IN_USE: … Call
// the tool again in 5s, with the same key and arguments." The entry io.github.holdfast-go/status of _meta has it as a
// google.rpc.Status in JSON. The words and codes are those of package idempotencygrpc. An error of a tool that comes from
// gRPC, or has the methods Code() string and HTTPStatus() int, is answered in the same form.
//
// # Stored results
//
// The record has the result as JSON, or the status of an error with a final code, such as NOT_FOUND. After any other
// error the key is free, unless idempotency.MarkEffect was called: an error without a code, a code that is not final, or
// a result that asks for input. Replays have the entry io.github.holdfast-go/idempotency-replayed in _meta.
//
// A tool that is one transaction stores its result there: see [Record] and [Reply].
package idempotencymcp
