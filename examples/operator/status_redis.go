package operator

import (
	"cmp"
	"context"
	"slices"
	"strings"
)

// RedisConnections returns the Connected of a Redis server, of a node where it is a cluster. List answers CLIENT LIST, as
// ClientList of a client does. Active clients wait for a blocking command, and waiting ones are in a MULTI. A server that
// forbids the command tells nothing. How many clients the server takes is not told.
func RedisConnections(list func(ctx context.Context) (string, error)) Connected {
	return func(ctx context.Context) ([]Connections, int, error) {
		answer, err := list(ctx)
		switch {
		case err != nil && strings.HasPrefix(err.Error(), "NOPERM"):
			return nil, 0, nil
		case err != nil:
			return nil, 0, err
		}
		return clientsByRole(answer), 0, nil
	}
}

// clientsByRole reads https://redis.io/docs/latest/commands/client-list/.
func clientsByRole(answer string) []Connections {
	type client struct{ role, program string }
	counts := map[client]*Connections{}
	for line := range strings.Lines(answer) {
		fields := map[string]string{}
		for field := range strings.FieldsSeq(line) {
			name, value, _ := strings.Cut(field, "=")
			fields[name] = value
		}
		who := client{fields["user"], cmp.Or(fields["name"], fields["lib-name"])}
		if counts[who] == nil {
			counts[who] = &Connections{Role: who.role, Program: who.program}
		}
		switch flags := fields["flags"]; {
		case strings.Contains(flags, "b"):
			counts[who].Active++
		case strings.Contains(flags, "x"):
			counts[who].Waiting++
		default:
			counts[who].Idle++
		}
	}
	var roles []Connections
	for _, c := range counts {
		roles = append(roles, *c)
	}
	open := func(c Connections) int { return c.Active + c.Waiting + c.Idle }
	slices.SortFunc(roles, func(a, b Connections) int {
		return cmp.Or(open(b)-open(a), strings.Compare(a.Role, b.Role), strings.Compare(a.Program, b.Program))
	})
	return roles[:min(len(roles), maxRoles)]
}
