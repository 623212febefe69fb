package operator_test

import (
	"encoding/json"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/agents"
	"github.com/holdfast-go/holdfast/modules/operator/command"
)

// agent is a client of the operator of a rig.
type agent struct {
	*rig
	*mcp.ClientSession
}

func newAgent(t *testing.T, cfg agents.Config, other ...func(*operator.Config)) *agent {
	t.Helper()
	r := newRig(t)
	for _, change := range other {
		change(&r.cfg)
	}
	server := must(agents.New(r.cfg, cfg))(t)
	here, there := mcp.NewInMemoryTransports()
	served := must(server.Connect(t.Context(), there, nil))(t)
	t.Cleanup(func() { _ = served.Wait() })
	return &agent{r, connect(t, here)}
}

func connect(t *testing.T, to mcp.Transport) *mcp.ClientSession {
	t.Helper()
	session := must(mcp.NewClient(&mcp.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), to, nil))(t)
	t.Cleanup(func() { _ = session.Close() })
	return session
}

// tools returns the names of the tools. A tool that changes something has an exclamation mark.
func tools(t *testing.T, s *mcp.ClientSession) (names []string) {
	t.Helper()
	for _, tool := range must(s.ListTools(t.Context(), nil))(t).Tools {
		name := tool.Name
		if !tool.Annotations.ReadOnlyHint {
			name += "!"
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// answers calls a tool. The answer must contain all parts, but no part that starts with an exclamation mark.
func (a *agent) answers(t *testing.T, tool string, arguments map[string]any, parts ...string) {
	t.Helper()
	answer, failed := a.call(t, tool, arguments)
	if failed {
		t.Errorf("%s %v fails: %s", tool, arguments, answer)
	}
	for _, part := range parts {
		unwanted, not := strings.CutPrefix(part, "!")
		if strings.Contains(answer, unwanted) == not {
			t.Errorf("%s %v returned %s, against %q", tool, arguments, answer, part)
		}
	}
}

// refuses calls a tool that must fail with the text.
func (a *agent) refuses(t *testing.T, tool string, arguments map[string]any, text string) {
	t.Helper()
	if answer, failed := a.call(t, tool, arguments); !failed || !strings.Contains(answer, text) {
		t.Errorf("%s %v must fail with %q, returned %s", tool, arguments, text, answer)
	}
}

func (a *agent) call(t *testing.T, tool string, arguments map[string]any) (answer string, failed bool) {
	t.Helper()
	result, err := a.CallTool(t.Context(), &mcp.CallToolParams{Name: tool, Arguments: arguments})
	if err != nil {
		return err.Error(), true
	}
	for _, content := range result.Content {
		if text, ok := content.(*mcp.TextContent); ok {
			answer += text.Text
		}
	}
	if !result.IsError && !json.Valid([]byte(answer)) {
		t.Errorf("%s answers with no JSON: %s", tool, answer)
	}
	return answer, result.IsError
}

var readers = []string{"dead_letters", "explain", "groups", "idempotency", "limits", "log", "running", "status", "waiting"}

// An agent may read all but bodies and headers, and change nothing, unless more is allowed.
func TestMCPReads(t *testing.T) {
	t.Parallel()
	a := newAgent(t, agents.Config{})
	if got := tools(t, a.ClientSession); !slices.Equal(got, readers) {
		t.Errorf("the tools are %q", got)
	}
	if told := a.InitializeResult().Instructions; !strings.Contains(told, "never instructions") {
		t.Errorf("the instructions are %q", told)
	}
	a.answers(t, "status", nil, `"name":"billing"`, `"overdue":2`, `"unrecoverable":3`)
	a.answers(t, "groups", map[string]any{"from": []string{"billing"}}, `"count":2`, "no handler for c", "!no exchange")
	a.answers(t, "dead_letters", nil, "no exchange a", "no handler for d", "!secret", "!tenant", `!"more"`)
	a.answers(t, "dead_letters", map[string]any{"error": "for c", "limit": 1}, "no handler for c", "!for d", `"more":true`)
	a.answers(t, "explain", map[string]any{"id": a.ids["a"]}, "no exchange a", "the broker rejects", `"alike":1`, "!secret", "!tenant")
	a.answers(t, "explain", map[string]any{"id": a.ids["d"], "from": []string{"inbox"}}, "no handler for d", "another attempt is of no use")
	a.answers(t, "waiting", nil, `"found":[]`)
	a.answers(t, "limits", map[string]any{"key": "grace"}, `"remaining":10`)
	a.answers(t, "idempotency", map[string]any{"key": "k"}, `"found":[]`)
	a.answers(t, "log", nil, `"found":[]`)
	for text, wrong := range map[string]map[string]any{
		"may not see bodies": {"id": a.ids["a"], "body": true}, "is not an id": {"id": "1"}, "no part knows message": {"id": "01a20bc2-2644-7363-82b4-0ab2b5714117"},
		"there is no": {"id": a.ids["a"], "from": []string{"x"}},
	} {
		a.refuses(t, "explain", wrong, text)
	}
	a.refuses(t, "dead_letters", map[string]any{"since": "yesterday"}, "since")
	a.refuses(t, "limits", map[string]any{"key": ""}, "name one caller")
	a.refuses(t, "idempotency", map[string]any{"key": "\n"}, "not a key")
	a.refuses(t, "retry", map[string]any{"all": true, "reason": "x"}, "unknown tool")
}

// An agent that may change something chooses, gives a reason, and is recorded in the log.
func TestMCPChanges(t *testing.T) {
	t.Parallel()
	a := newAgent(t, agents.Config{Access: operator.Access{By: "agent of ada", Bodies: true, Change: true}, Mask: func(m operator.MaskedMessage) []byte {
		if m.Name == "d" {
			return nil
		}
		return m.Body
	}})
	if got := tools(t, a.ClientSession); !slices.Equal(got, slices.Sorted(slices.Values(append([]string{"retry!", "drop!", "pause!", "resume!"}, readers...)))) {
		t.Errorf("the tools are %q", got)
	}
	a.answers(t, "explain", map[string]any{"id": a.ids["a"], "body": true}, `secret`, `"tenant":"x"`)
	a.answers(t, "explain", map[string]any{"id": a.ids["a"]}, `!secret`, `!tenant`)
	a.answers(t, "explain", map[string]any{"id": a.ids["d"], "body": true}, "hidden by the service", `!"body":`)
	for text, wrong := range map[string]map[string]any{
		"choose by": {"reason": "x"}, "reason": {"all": true}, "patch is a JSON": {"all": true, "reason": "x", "patch": "["}, "rate": {"all": true, "reason": "x", "rate": -1},
		"control characters": {"all": true, "reason": "a\nb"}, "limit": {"limit": -1, "reason": "x"},
	} {
		a.refuses(t, "retry", wrong, text)
	}
	a.answers(t, "retry", map[string]any{"from": []string{"outbox"}, "all": true, "reason": "x", "dry_run": true}, `"from":"outbox","count":2,"dry_run":true`)
	a.answers(t, "log", nil, `"found":[]`)
	a.answers(t, "retry", map[string]any{"ids": []any{a.ids["a"]}, "from": []string{"outbox"}, "patch": `{"secret":"z"}`, "reason": "the exchange is there"}, `"count":1`)
	if body := a.published(t, "a"); body != `{"secret":"z"}` {
		t.Errorf("the body is %s", body)
	}
	a.answers(t, "retry", map[string]any{"from": []string{"billing"}, "name": "d", "patch": `{"a":1}`, "reason": "x"}, `"count":0,"failed":1`, "hides a part")
	a.answers(t, "drop", map[string]any{"from": []string{"billing"}, "all": true, "reason": "a test"}, `"count":3`)
	a.answers(t, "dead_letters", map[string]any{"from": []string{"billing"}}, `"found":[]`)
	a.answers(t, "pause", map[string]any{"part": "outbox", "reason": "the broker moves"}, `"paused":true`)
	a.answers(t, "status", nil, `"by":"agent of ada","reason":"the broker moves"`)
	a.answers(t, "resume", map[string]any{"part": "outbox", "reason": "it has"}, `"paused":false`)
	a.answers(t, "status", nil, "!the broker moves")
	a.refuses(t, "pause", map[string]any{"part": "holds", "reason": "x"}, "no outbox")
	a.answers(t, "log", nil, "edit and retry", "agent of ada", "the exchange is there", `"drop"`)
}

func TestMCPWithoutName(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, access := range []operator.Access{{Change: true}, {By: "a\nb"}, {By: strings.Repeat("x", 129)}} {
		if _, err := agents.New(r.cfg, agents.Config{Access: access}); err == nil {
			t.Errorf("%+v is accepted", access)
		}
	}
}

// The command serves an agent until the session ends.
func TestMCPCommand(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	in, to := io.Pipe()
	from, out := io.Pipe()
	root := must(command.New(r.cfg))(t)
	root.SetIn(in)
	code := make(chan int, 1)
	go func() {
		code <- command.Execute(t.Context(), root, []string{"mcp", "--change", "--by=ada"}, out, io.Discard)
	}()
	session := connect(t, &mcp.IOTransport{Reader: from, Writer: to})
	if got := tools(t, session); !slices.Contains(got, "retry!") {
		t.Errorf("the tools are %q", got)
	}
	check(t, session.Close())
	if got := <-code; got != 0 {
		t.Errorf("it exits with %d", got)
	}
	if got, _, _ := r.run(t, "mcp", "--change", "--by="); got != 2 {
		t.Errorf("without a name it exits with %d", got)
	}
}
