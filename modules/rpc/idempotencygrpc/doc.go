// Package idempotencygrpc lets a unary call of gRPC with an idempotency key take effect once.
// Repeated calls get the same answer.
//
//	user := func(r *http.Request) (string, error) { return userOf(r.Context()), nil }
//	once, err := idempotencygrpc.New(store, user, nil, idempotency.MiddlewareConfig{})
//	server := grpc.NewServer(grpc.ChainUnaryInterceptor(authenticate, limits.Unary, once.Unary))
//
// The key is in the metadata idempotency-key. The middleware of package idempotency decides.
// The middleware and the functions of its configuration see a call as its HTTP request on the
// wire: POST, the path /package.Service/Method, the metadata as header, the peer's address,
// and the context of the call. So one scope serves HTTP and gRPC. Lifetimes, leases, settings,
// logs and metrics are the same.
//
// Two calls are the same if procedure and message are equal. Messages are compared in their
// deterministic form, without fields that the server does not know. That form may change with
// the schema or the protobuf library. While servers are replaced by ones with more fields, a
// repeated call with such a field may be rejected as IDEMPOTENCY_KEY_REUSED; it does not take
// effect twice. Deploy a field to all servers before clients send it.
//
// # Errors
//
//	INVALID_ARGUMENT     IDEMPOTENCY_KEY_REQUIRED        the procedure needs a key
//	INVALID_ARGUMENT     IDEMPOTENCY_KEY_INVALID         not a key, or several
//	ABORTED              IDEMPOTENCY_KEY_IN_USE          in progress; RetryInfo is the lease left
//	FAILED_PRECONDITION  IDEMPOTENCY_KEY_REUSED          the key belongs to another call
//	ALREADY_EXISTS       IDEMPOTENCY_RESULT_UNAVAILABLE  it ran, its answer could not be stored
//	UNAVAILABLE          IDEMPOTENCY_STORE_UNAVAILABLE   the store is down, or the lease was lost
//	INVALID_ARGUMENT     REQUEST_TOO_LARGE               the message is above MaxRequestBytes
//	UNAVAILABLE          NOT_COMMITTED                   the transaction had no effect; try again
//	UNAVAILABLE          DATABASE_UNAVAILABLE            of txretry: nothing was done
//	UNAVAILABLE          LOCK_TIMEOUT                    of txretry: nothing was done
//	INTERNAL             COMMIT_UNKNOWN                  of txretry: it may be done; idempotencypgx resolves it
//	INTERNAL             INTERNAL                        the scope failed; the log has the reason
//
// The word is the reason of an ErrorInfo of the domain github.com/holdfast-go/holdfast. RetryInfo
// is the time to wait, and Help links to the description of the word. An error of a handler with
// the methods Code() string and HTTPStatus() int is answered in the same form.
//
// # Stored answers
//
// The record has the bytes of the message, or the status of an error with its details, and the
// header and trailer metadata named by KeepHeaders. Replays carry idempotency-replayed: true. The
// codes OK, INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, FAILED_PRECONDITION
// and OUT_OF_RANGE are final. After any other, such as UNAVAILABLE or ABORTED, the key is free,
// unless idempotency.MarkEffect was called. MiddlewareConfig.Keep sees an answer with the HTTP
// status that google.rpc.Code names, except 503 for CANCELLED and ABORTED, 412 for
// FAILED_PRECONDITION and 416 for OUT_OF_RANGE. Connect shares the records: a key that was used
// over one protocol is replayed over the other.
//
// A handler that is one transaction stores its answer there: see [Record] and [Reply].
//
// The metadata of a handler is sent with the answer, after the answer is stored, also after
// grpc.SendHeader. grpc.SetSendCompressor and grpc.ClientSupportedCompressors need the stream of
// the transport. They return an error in handlers behind Unary: set compression before it.
//
// Streams pass unchanged.
package idempotencygrpc
