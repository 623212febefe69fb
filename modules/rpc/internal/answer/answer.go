// Package answer encodes the answer to an RPC for a record: the bytes of the message, or of a
// google.rpc.Status with its details, and the name of their type. The form is the same for
// every protocol.
package answer

import (
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strings"
	"unicode/utf8"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/exchange"
)

// errForeign means that a record is not the answer to an RPC.
var errForeign = errors.New("the record is not the answer to an RPC")

// OfMessage encodes a message for a record.
func OfMessage(m proto.Message) (idempotency.Response, error) {
	return encode(http.StatusOK, m)
}

// OfStatus encodes the status of a failure for a record. Bytes of its message that are not
// UTF-8, such as in the name of a file, are replaced.
func OfStatus(s *spb.Status) (idempotency.Response, error) {
	if !utf8.ValidString(s.GetMessage()) {
		s = &spb.Status{Code: s.GetCode(), Message: strings.ToValidUTF8(s.GetMessage(), "\uFFFD"), Details: s.GetDetails()}
	}
	return encode(exchange.HTTPStatus(s.GetCode()), s)
}

func encode(status int, m proto.Message) (idempotency.Response, error) {
	if m == nil {
		return idempotency.Response{}, errors.New("the answer is no protobuf message")
	}
	body, err := proto.Marshal(m)
	if err != nil {
		return idempotency.Response{}, fmt.Errorf("encode answer: %w", err)
	}
	media := mime.FormatMediaType(exchange.Media, map[string]string{"message": string(m.ProtoReflect().Descriptor().FullName())})
	return idempotency.Response{Status: status, Header: http.Header{"Content-Type": {media}}, Body: body}, nil
}

// Decode returns the message of a record, or the status of a failure. The type of the message must
// be linked into the program.
func Decode(resp idempotency.Response) (proto.Message, *spb.Status, error) {
	name, failed, err := kind(resp)
	if err != nil {
		return nil, nil, err
	}
	if failed {
		s := &spb.Status{}
		return nil, s, unmarshal(resp.Body, s)
	}
	typ, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(name))
	if err != nil {
		return nil, nil, fmt.Errorf("decode answer: %w", err)
	}
	m := typ.New().Interface()
	return m, nil, unmarshal(resp.Body, m)
}

// Into is Decode for a message whose type the caller knows.
func Into(resp idempotency.Response, m proto.Message) (*spb.Status, error) {
	name, failed, err := kind(resp)
	switch want := m.ProtoReflect().Descriptor().FullName(); {
	case err != nil:
		return nil, err
	case failed:
		s := &spb.Status{}
		return s, unmarshal(resp.Body, s)
	case name != string(want):
		return nil, fmt.Errorf("the record is a %s, not a %s", name, want)
	}
	return nil, unmarshal(resp.Body, m)
}

func kind(resp idempotency.Response) (name string, failed bool, err error) {
	media, parameters, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil || media != exchange.Media || parameters["message"] == "" {
		return "", false, errForeign
	}
	return parameters["message"], resp.Status != http.StatusOK, nil
}

func unmarshal(data []byte, m proto.Message) error {
	if err := proto.Unmarshal(data, m); err != nil {
		return fmt.Errorf("decode answer: %w", err)
	}
	return nil
}
