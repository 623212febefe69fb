// Package idempotencygrpc lets a unary call of gRPC that carries a key take effect once: the
// first one does the work, every repetition gets the same answer.
//
//	user := func(r *http.Request) (string, error) { return userOf(r.Context()), nil }
//	once, err := idempotencygrpc.New(store, user, nil, idempotency.MiddlewareConfig{})
//	server := grpc.NewServer(grpc.ChainUnaryInterceptor(authenticate, limits.Unary, once.Unary))
//
// The key is in the metadata idempotency-key. The middleware of package idempotency decides:
// to it, and to the functions of its configuration, a call is the HTTP request that it is on
// the wire (POST, the path /package.Service/Method, the metadata as header, the address of
// the peer, and the context of the call), so one scope serves HTTP and gRPC. The key's life,
// its leases, the settings, the logs and the metrics are the same. Two calls are the same
// call when procedure and message are: the message counts in its deterministic form, without
// fields that the server does not know. That form may change with the schema or the protobuf
// library: while servers are replaced by ones that know more fields, a repetition that sends
// such a field may be refused as IDEMPOTENCY_KEY_REUSED, and is not done twice. Let servers
// know a field before clients send it.
//
// # What a client gets
//
//	INVALID_ARGUMENT     IDEMPOTENCY_KEY_REQUIRED        the procedure needs a key, there is none
//	INVALID_ARGUMENT     IDEMPOTENCY_KEY_INVALID         not a key, or several
//	ABORTED              IDEMPOTENCY_KEY_IN_USE          in progress; RetryInfo is the lease left
//	FAILED_PRECONDITION  IDEMPOTENCY_KEY_REUSED          the key belongs to another call
//	ALREADY_EXISTS       IDEMPOTENCY_RESULT_UNAVAILABLE  it ran, its answer could not be kept
//	UNAVAILABLE          IDEMPOTENCY_STORE_UNAVAILABLE   the store is down, or the lease was lost
//	INVALID_ARGUMENT     REQUEST_TOO_LARGE               the message is above MaxRequestBytes
//	UNAVAILABLE          NOT_COMMITTED                   the transaction left nothing; try again
//	UNAVAILABLE          DATABASE_UNAVAILABLE            of txretry: nothing was done
//	UNAVAILABLE          LOCK_TIMEOUT                    of txretry: nothing was done
//	INTERNAL             COMMIT_UNKNOWN                  of txretry: it may be done; idempotencypgx finds out
//	INTERNAL             INTERNAL                        the scope failed; the log says why
//
// The words are the reason of an ErrorInfo of the domain github.com/holdfast-go/holdfast. RetryInfo
// says how long to wait, and Help links to what the word means. An error of a handler with the
// methods Code() string and HTTPStatus() int is answered in the same form.
//
// # What is kept
//
// The bytes of the message, or the status of a failure with its details; and of header and
// trailer metadata what KeepHeaders names. Replays carry idempotency-replayed: true. The codes
// OK, INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, FAILED_PRECONDITION and
// OUT_OF_RANGE are final. After any other, such as UNAVAILABLE or ABORTED, the key is free,
// unless idempotency.MarkEffect was called. For MiddlewareConfig.Keep an answer has the HTTP
// status that google.rpc.Code names, but 503 for CANCELLED and ABORTED, 412 for
// FAILED_PRECONDITION and 416 for OUT_OF_RANGE. Records are the same for Connect: a key that
// came by one protocol is replayed by the other.
//
// A handler that is one transaction keeps its answer there: see [Record] and [Reply].
//
// Metadata of a handler, that of grpc.SendHeader too, leaves with the answer, after it is
// stored. grpc.SetSendCompressor and grpc.ClientSupportedCompressors, which want the stream of
// the transport, return an error in handlers behind Unary: set compression before it.
//
// Streams pass untouched.
package idempotencygrpc
