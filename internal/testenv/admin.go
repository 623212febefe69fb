package testenv

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// longestAnswer bounds an answer of the management API, in bytes.
const longestAnswer = 16 << 20

// Admin calls RabbitMQ's management API: adminURL is that of Server.AdminURL or AMQPAdminURL, path begins with /api/.
// In is sent as JSON, and the answer is read into out; nil stands for nothing. A status other than 2xx is an error.
// A call takes at most Patience, and keeps no connection.
func Admin(ctx context.Context, adminURL, method, path string, in, out any) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(adminURL, "/")+path, body)
	if err != nil {
		return err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, longestAnswer))
	if err != nil {
		return err
	}
	if resp.StatusCode < http.StatusOK || resp.StatusCode >= http.StatusMultipleChoices {
		return fmt.Errorf("testenv: management API: %s %s: %s: %s", method, path, resp.Status, bytes.TrimSpace(text))
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(text, out)
}

// AddVHost makes an empty virtual host that the user of adminURL may use.
func AddVHost(ctx context.Context, adminURL, name string) error {
	return Admin(ctx, adminURL, http.MethodPut, "/api/vhosts/"+name, struct{}{}, nil)
}

// RemoveVHost deletes a virtual host with its queues and connections.
func RemoveVHost(ctx context.Context, adminURL, name string) error {
	return Admin(ctx, adminURL, http.MethodDelete, "/api/vhosts/"+name, nil, nil)
}
