// Package natstest connects tests to the shared NATS.
package natstest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Name returns a name that no other test has. Streams whose names begin with it are deleted when the test ends.
func Name(t testing.TB, conn *nats.Conn) string {
	t.Helper()
	name := "t" + strings.ToLower(rand.Text()[:10])
	t.Cleanup(func() {
		js := JetStream(t, conn)
		names := js.StreamNames(context.WithoutCancel(t.Context()))
		for stream := range names.Name() {
			if !strings.HasPrefix(stream, name) {
				continue
			}
			if err := js.DeleteStream(context.WithoutCancel(t.Context()), stream); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
				t.Error(err)
			}
		}
	})
	return name
}

// Connect returns a connection that reconnects for ever and soon. It is closed when the test ends.
func Connect(t testing.TB, url string) *nats.Conn {
	t.Helper()
	conn, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.ReconnectJitter(0, 0),
		nats.RetryOnFailedConnect(true), nats.Timeout(10*time.Second), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	closed := make(chan struct{})
	conn.SetClosedHandler(func(*nats.Conn) { close(closed) })
	t.Cleanup(func() {
		conn.Close()
		<-closed
	})
	return conn
}

// New returns a connection to the shared server.
func New(t testing.TB) *nats.Conn {
	t.Helper()
	return Connect(t, testenv.NATSURL(t))
}

// JetStream returns the client of a connection.
func JetStream(t testing.TB, conn *nats.Conn) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(conn, jetstream.WithDefaultTimeout(testenv.Patience))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// Rights are the subjects that a user may publish on, by the calls that need them.
type Rights map[string][]string

var right = regexp.MustCompile(`(?m)^//\t([A-Z]\w+)  +(.+[.].+)$`)

// ReadRights reads the list in the file doc.go of the package that is tested.
func ReadRights(t testing.TB) Rights {
	t.Helper()
	text, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	all := Rights{}
	for _, found := range right.FindAllStringSubmatch(string(text), -1) {
		all[found[1]] = append(all[found[1]], strings.Fields(found[2])...)
	}
	return all
}

// Replace replaces a token in the subjects of the server.
func (r Rights) Replace(token, by string) {
	for _, subjects := range r {
		for i, subject := range subjects {
			tokens := strings.Split(subject, ".")
			for j := range tokens {
				if tokens[0] == "$JS" && tokens[j] == token {
					tokens[j] = by
				}
			}
			subjects[i] = strings.Join(tokens, ".")
		}
	}
}

// Limited starts a server with users that have the rights of some calls, and returns connections of theirs. "admin" may do
// everything. When the test ends, each right was used and none was lacking.
func (r Rights) Limited(t testing.TB, users map[string][]string) func(user string) *nats.Conn {
	t.Helper()
	lines := []string{"no_auth_user: admin", "authorization { users: [", "{user: admin, password: p}"}
	for user, calls := range users {
		var subjects []string
		for _, call := range calls {
			subjects = append(subjects, r[call]...)
		}
		lines = append(lines, fmt.Sprintf(`{user: %s, password: p, permissions: {subscribe: "_INBOX.>", publish: {allow: ["%s"]}}}`,
			user, strings.Join(subjects, `", "`)))
	}
	server := testenv.Private(t, testenv.NATS, append(lines, "] }")...)
	connect := func(user string) *nats.Conn {
		conn := Connect(t, strings.Replace(server.URL(), "//", "//"+user+":p@", 1))
		conn.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { t.Errorf("%s: %v", user, err) })
		return conn
	}
	admin := connect("admin")
	for _, call := range slices.Concat(slices.Collect(maps.Values(users))...) {
		for _, subject := range r[call] {
			used, err := admin.SubscribeSync(subject)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				err := admin.Flush() // all messages have arrived
				if n, _, _ := used.Pending(); n == 0 || err != nil {
					t.Errorf("%s does not need the right to publish on %s, error %v", call, subject, err)
				}
			})
		}
	}
	if err := admin.Flush(); err != nil {
		t.Fatal(err)
	}
	return connect
}
