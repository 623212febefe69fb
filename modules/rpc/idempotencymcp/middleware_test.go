package idempotencymcp_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/modules/rpc/idempotencymcp"
)

const keyEntry = "io.github.holdfast-go/idempotency-key"

// tool is a tool behind the middleware, without a transport.
type tool struct {
	t       *testing.T
	handler mcp.MethodHandler
	runs    int
	result  mcp.Result
	err     error
}

func newTool(t *testing.T) *tool {
	t.Helper()
	one := func(*mcp.CallToolRequest) (string, error) { return "ann", nil }
	once, err := idempotencymcp.New(idempotencytest.NewStore(), one, nil, idempotency.MiddlewareConfig{ParseKey: idempotency.ParseOpaque})
	if err != nil {
		t.Fatal(err)
	}
	tl := &tool{t: t, result: &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: "done"}}}}
	tl.handler = once(func(context.Context, string, mcp.Request) (mcp.Result, error) {
		tl.runs++
		return tl.result, tl.err
	})
	return tl
}

func (tl *tool) call(args string, meta mcp.Meta) (*mcp.CallToolResult, error) {
	tl.t.Helper()
	params := &mcp.CallToolParamsRaw{Name: "order", Arguments: json.RawMessage(args), Meta: meta}
	result, err := tl.handler(tl.t.Context(), "tools/call", &mcp.CallToolRequest{Params: params})
	own, _ := result.(*mcp.CallToolResult)
	return own, err
}

// wantText checks the text of a result, and whether it is an error.
func (tl *tool) wantText(args string, meta mcp.Meta, failed bool, text string) {
	tl.t.Helper()
	result, err := tl.call(args, meta)
	if err != nil || len(result.Content) != 1 {
		tl.t.Fatalf("%s: %+v, %v", args, result, err)
	}
	if got := result.Content[0].(*mcp.TextContent).Text; result.IsError != failed || !strings.Contains(got, text) {
		tl.t.Errorf("%s: error %t, text %q; want %t, %q", args, result.IsError, got, failed, text)
	}
}

func TestMiddleware_findsTheKey(t *testing.T) {
	t.Parallel()
	tl := newTool(t)
	tl.wantText(`{"idempotency_key":"k1","a":1.0,"b":{"c":2,"d":[]}}`, nil, false, "done")
	tl.wantText(`{"b": {"d": [], "c": 2}, "a": 1.0, "idempotency_key": "k1"}`, nil, false, "done")
	tl.wantText(`{"a":1.0,"b":{"c":2,"d":[]}}`, mcp.Meta{keyEntry: "k1"}, false, "done")
	tl.wantText(`{"a":1.0,"b":{"c":2,"d":[]},"idempotency_key":"k1"}`, mcp.Meta{keyEntry: "k1"}, false, "done")
	if tl.runs != 1 {
		t.Errorf("%d runs of one call", tl.runs)
	}
	tl.wantText(`{"a":2,"idempotency_key":"k1"}`, nil, true, "IDEMPOTENCY_KEY_REUSED: ")
	tl.wantText(`{"a":2,"idempotency_key":"k2"}`, mcp.Meta{keyEntry: "k3"}, true, "IDEMPOTENCY_KEY_INVALID: ")
	tl.wantText(`{"a":2,"idempotency_key":{"x":[]}}`, nil, true, "IDEMPOTENCY_KEY_INVALID: The argument idempotency_key must be sent exactly once")
	tl.wantText(`{"a":2}`, nil, true, "IDEMPOTENCY_KEY_REQUIRED: This request needs the argument idempotency_key")
	tl.wantText(``, nil, true, "IDEMPOTENCY_KEY_REQUIRED: ")
	tl.wantText(``, mcp.Meta{keyEntry: "k4"}, false, "done")
	tl.wantText(`{"idempotency_key":"k4"}`, nil, false, "done")
	if tl.runs != 2 {
		t.Errorf("%d runs of two calls", tl.runs)
	}
}

// A result or an error that is no final answer frees the key, and reaches the client unchanged.
func TestMiddleware_frees(t *testing.T) {
	t.Parallel()
	failed := &mcp.CallToolResult{IsError: true, Content: []mcp.Content{&mcp.TextContent{Text: "provider is down"}}}
	for name, tt := range map[string]struct {
		result *mcp.CallToolResult
		err    error
	}{
		"no result":                {nil, nil},
		"an error of the protocol": {nil, errors.New("no such tool")},
		"an error without a code":  {failed, nil},
		"a question":               {&mcp.CallToolResult{InputRequests: mcp.InputRequestMap{"name": &mcp.ElicitParams{Message: "Which?"}}}, nil},
	} {
		tl := newTool(t)
		done := tl.result
		tl.result, tl.err = tt.result, tt.err
		args := `{"idempotency_key":"k"}`
		got, err := tl.call(args, nil)
		if got != tt.result || !errors.Is(err, tt.err) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		tl.result, tl.err = done, nil
		if tl.wantText(args, nil, false, "done"); tl.runs != 2 {
			t.Errorf("%s: %d runs", name, tl.runs)
		}
	}
}

// A replay is marked, and the result that the tool returned stays as it was.
func TestMiddleware_marksReplays(t *testing.T) {
	t.Parallel()
	tl := newTool(t)
	own := tl.result.(*mcp.CallToolResult)
	own.Meta = mcp.Meta{"trace": "1"}
	own.StructuredContent = json.RawMessage(`{"id":9007199254740993}`)
	for n := range 2 {
		got, err := tl.call(`{"idempotency_key":"k"}`, nil)
		if err != nil {
			t.Fatal(err)
		}
		if replayed := got.Meta["io.github.holdfast-go/idempotency-replayed"] == true; replayed != (n > 0) || got.Meta["trace"] != "1" {
			t.Errorf("call %d: %v", n+1, got.Meta)
		}
		if content, err := json.Marshal(got.StructuredContent); err != nil || string(content) != `{"id":9007199254740993}` {
			t.Errorf("call %d: %s, %v", n+1, content, err)
		}
	}
	if len(own.Meta) != 1 {
		t.Errorf("the tool's own result was changed: %v", own.Meta)
	}
}

func TestNew_rejects(t *testing.T) {
	t.Parallel()
	one := func(*mcp.CallToolRequest) (string, error) { return "ann", nil }
	if _, err := idempotencymcp.New(idempotencytest.NewStore(), nil, nil, idempotency.MiddlewareConfig{}); err == nil {
		t.Error("a nil scope is accepted")
	}
	if _, err := idempotencymcp.New(nil, one, nil, idempotency.MiddlewareConfig{}); err == nil {
		t.Error("a nil store is accepted")
	}
	for name, cfg := range map[string]idempotency.MiddlewareConfig{
		"Methods": {Methods: []string{"POST"}}, "CanonicalJSON": {CanonicalJSON: true}, "KeepHeaders": {KeepHeaders: []string{"Location"}},
	} {
		if _, err := idempotencymcp.New(idempotencytest.NewStore(), one, nil, cfg); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}
