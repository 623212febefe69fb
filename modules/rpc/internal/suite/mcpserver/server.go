// Package mcpserver runs the suites over the Model Context Protocol.
package mcpserver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"testing"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/modules/rpc/idempotencymcp"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/shopv1"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite"
	"github.com/holdfast-go/holdfast/modules/rpc/internal/suite/grpcserver"
)

// The tools are named like the procedures, so that the suites see the same paths.
const (
	place = "shop.v1.Shop/PlaceOrder"
	get   = "shop.v1.Shop/GetOrder"
)

// Start returns a suite.Protocol whose handlers are typed, so that the SDK turns their errors into results, or not.
func Start(typed bool) suite.Protocol {
	return func(t *testing.T, s suite.Setup) suite.Client {
		t.Helper()
		server := mcp.NewServer(&mcp.Implementation{Name: "shop"}, nil)
		add(server, typed, place, func(ctx context.Context, args json.RawMessage) (*mcp.CallToolResult, error) {
			req := &shopv1.PlaceOrderRequest{}
			if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(args, req); err != nil {
				return nil, err
			}
			order, err := s.Place(ctx, req, func(http.Header, http.Header) {})
			if err != nil {
				return nil, grpcserver.Error(err)
			}
			return Result(order)
		})
		add(server, typed, get, func(context.Context, json.RawMessage) (*mcp.CallToolResult, error) {
			return Result(&shopv1.Order{})
		})
		if s.Store != nil {
			server.AddReceivingMiddleware(recovering, protect(t, s))
		}
		return client{connect(t, server)}
	}
}

func protect(t *testing.T, s suite.Setup) mcp.Middleware {
	t.Helper()
	s.Once.KeepHeaders = nil // results have no headers
	user := func(req *mcp.CallToolRequest) (string, error) {
		return suite.User(&http.Request{Header: req.Extra.Header})
	}
	once, err := idempotencymcp.New(s.Store, user, func(tool string) bool {
		if s.Needs != nil {
			return s.Needs("/" + tool)
		}
		return tool != get
	}, s.Once)
	if err != nil {
		t.Fatal(err)
	}
	return once
}

func add(server *mcp.Server, typed bool, name string, run func(ctx context.Context, args json.RawMessage) (*mcp.CallToolResult, error)) {
	tool := &mcp.Tool{Name: name, InputSchema: json.RawMessage(`{"type":"object"}`)}
	if !typed {
		server.AddTool(tool, func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return run(ctx, req.Params.Arguments)
		})
		return
	}
	mcp.AddTool(server, tool, func(ctx context.Context, req *mcp.CallToolRequest, _ any) (*mcp.CallToolResult, any, error) {
		result, err := run(ctx, req.Params.Arguments)
		return result, nil, err
	})
}

// Result returns an order as the result of a tool. A text that is not UTF-8 makes it impossible to encode.
func Result(order *shopv1.Order) (*mcp.CallToolResult, error) {
	if !utf8.ValidString(order.GetId()) {
		return &mcp.CallToolResult{StructuredContent: math.NaN()}, nil
	}
	encoded, err := protojson.Marshal(order)
	if err != nil {
		return nil, err
	}
	return &mcp.CallToolResult{StructuredContent: json.RawMessage(encoded), Content: []mcp.Content{&mcp.TextContent{Text: string(encoded)}}}, nil
}

// Order returns the order in a result.
func Order(result *mcp.CallToolResult) (*shopv1.Order, error) {
	order := &shopv1.Order{}
	encoded, err := json.Marshal(result.StructuredContent)
	if err != nil {
		return nil, err
	}
	return order, protojson.Unmarshal(encoded, order)
}

// recovering turns panics into errors, as servers do.
func recovering(next mcp.MethodHandler) mcp.MethodHandler {
	return func(ctx context.Context, method string, req mcp.Request) (_ mcp.Result, err error) {
		defer func() {
			if p := recover(); p != nil {
				err = &jsonrpc.Error{Code: jsonrpc.CodeInternalError, Message: fmt.Sprint(p)}
			}
		}()
		return next(ctx, method, req)
	}
}

func connect(t *testing.T, server *mcp.Server) *mcp.ClientSession {
	t.Helper()
	web := httptest.NewServer(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, nil))
	transport := &http.Transport{MaxIdleConnsPerHost: 32} // the calls of a stampede
	session, err := mcp.NewClient(&mcp.Implementation{Name: "test"}, nil).Connect(t.Context(), &mcp.StreamableClientTransport{
		Endpoint: web.URL, HTTPClient: &http.Client{Transport: headers{transport}}, DisableStandaloneSSE: true,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := session.Close(); err != nil {
			t.Error(err)
		}
		transport.CloseIdleConnections()
		web.Close()
	})
	return session
}

// headers sends the header in the context of a call.
type headers struct{ http.RoundTripper }

type headerKey struct{}

func (h headers) RoundTrip(r *http.Request) (*http.Response, error) {
	if header, ok := r.Context().Value(headerKey{}).(http.Header); ok {
		r = r.Clone(r.Context())
		maps.Copy(r.Header, header)
	}
	return h.RoundTripper.RoundTrip(r)
}

type client struct{ session *mcp.ClientSession }

func (client) Bare() bool { return true }

func (client) Record(order *shopv1.Order) (idempotency.Response, error) {
	return idempotencymcp.Record(Result(order))
}

func (c client) Health(ctx context.Context) error { return c.session.Ping(ctx, nil) }

func (c client) Place(ctx context.Context, a suite.Ask) suite.Reply {
	encoded, err := protojson.Marshal(a.Order())
	var args map[string]any
	if err := errors.Join(err, json.Unmarshal(encoded, &args)); err != nil {
		panic(err)
	}
	return c.call(ctx, a, place, args)
}

func (c client) Get(ctx context.Context, a suite.Ask) suite.Reply {
	return c.call(ctx, a, get, map[string]any{})
}

// Watch does nothing: the protocol has no streams.
func (client) Watch(context.Context, suite.Ask) suite.Reply { return suite.Reply{} }

// call sends the first key as an argument, and the second one in _meta.
func (c client) call(ctx context.Context, a suite.Ask, tool string, args map[string]any) suite.Reply {
	params := &mcp.CallToolParams{Name: tool, Arguments: args}
	for n, key := range a.Keys {
		if n == 0 {
			args["idempotency_key"] = key
		} else {
			params.Meta = mcp.Meta{"io.github.holdfast-go/idempotency-key": key}
		}
	}
	header := a.Header()
	header.Del(idempotency.Header)
	result, err := c.session.CallTool(context.WithValue(ctx, headerKey{}, header), params)
	if err != nil {
		return suite.Reply{Status: &spb.Status{Code: int32(codeOf(err)), Message: err.Error()}}
	}
	return reply(result)
}

func codeOf(err error) codes.Code {
	wire, _ := errors.AsType[*jsonrpc.Error](err)
	switch {
	case errors.Is(err, context.Canceled):
		return codes.Canceled
	case wire != nil && wire.Code == jsonrpc.CodeInternalError:
		return codes.Internal
	}
	return codes.Unknown
}

func reply(result *mcp.CallToolResult) suite.Reply {
	r := suite.Reply{Header: http.Header{}}
	for entry, name := range map[string]string{"idempotency-replayed": idempotency.ReplayedHeader, "idempotency-bypassed": "Idempotency-Bypassed"} {
		if result.Meta["io.github.holdfast-go/"+entry] == true {
			r.Header.Set(name, "true")
		}
	}
	var err error
	if !result.IsError {
		if r.Order, err = Order(result); err != nil {
			r.Status = &spb.Status{Code: int32(codes.Unknown), Message: err.Error()}
		}
		return r
	}
	r.Status = &spb.Status{Code: int32(codes.Unknown)}
	if told, ok := result.Meta["io.github.holdfast-go/status"]; ok {
		encoded, err := json.Marshal(told)
		if err := errors.Join(err, protojson.Unmarshal(encoded, r.Status)); err != nil {
			r.Status = &spb.Status{Code: int32(codes.Unknown), Message: err.Error()}
		}
	}
	return r
}
