package idempotencymcp_test

import (
	"context"
	"fmt"
	"log"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/idempotency/driver"
	"github.com/holdfast-go/holdfast/idempotency/idempotencytest"
	"github.com/holdfast-go/holdfast/modules/rpc/idempotencymcp"
)

type order struct {
	Seat string `json:"seat"`
	Key  string `json:"idempotency_key" jsonschema:"a new random text; the same text to repeat a call"`
}

func orderServer(store driver.Store, owner func(*mcp.CallToolRequest) (string, error), place func(seat string) error) (*mcp.Server, error) {
	writes := func(tool string) bool { return tool == "place_order" }
	once, err := idempotencymcp.New(store, owner, writes, idempotency.MiddlewareConfig{ParseKey: idempotency.ParseOpaque})
	if err != nil {
		return nil, err
	}
	server := mcp.NewServer(&mcp.Implementation{Name: "shop"}, nil)
	mcp.AddTool(server, &mcp.Tool{Name: "place_order"}, func(_ context.Context, _ *mcp.CallToolRequest, o order) (*mcp.CallToolResult, any, error) {
		return nil, nil, place(o.Seat)
	})
	server.AddReceivingMiddleware(once) // behind authentication
	return server, nil
}

// A model that does not know whether its call took effect repeats it.
func ExampleNew() {
	ann := func(*mcp.CallToolRequest) (string, error) { return "ann", nil } // such as req.Extra.TokenInfo.UserID
	server, err := orderServer(idempotencytest.NewStore(), ann, func(seat string) error {
		fmt.Println("placed", seat)
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	near, far := mcp.NewInMemoryTransports()
	serving, err := server.Connect(ctx, far, nil)
	if err != nil {
		log.Fatal(err)
	}
	session, err := mcp.NewClient(&mcp.Implementation{Name: "agent"}, nil).Connect(ctx, near, nil)
	if err != nil {
		log.Fatal(err)
	}
	for _, seat := range []string{"A1", "A1", "A2"} {
		result, err := session.CallTool(ctx, &mcp.CallToolParams{Name: "place_order", Arguments: order{seat, "7c1f"}})
		if err != nil {
			log.Fatal(err)
		}
		for _, c := range result.Content {
			fmt.Println(c.(*mcp.TextContent).Text)
		}
	}
	if err := session.Close(); err != nil {
		log.Fatal(err)
	}
	_ = serving.Wait() // the client has left
	// Output:
	// placed A1
	// IDEMPOTENCY_KEY_REUSED: This Idempotency-Key was used for another request. Use a new key.
}
