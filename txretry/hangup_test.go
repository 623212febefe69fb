package txretry_test

import (
	"context"
	"io"
	"net"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/txretry"
)

// hangUp is a relay that, once armed, passes on a part of the server's next
// answer and then closes both sides in good order.
type hangUp struct {
	target string
	part   atomic.Pointer[func(answer []byte) []byte]
}

func (h *hangUp) serve(l net.Listener) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", h.target)
		if err != nil {
			_ = client.Close()
			return
		}
		go func() {
			_, _ = io.Copy(server, client)
			_ = server.Close()
		}()
		go h.answer(client, server)
	}
}

func (h *hangUp) answer(client, server net.Conn) {
	defer func() { _, _ = client.Close(), server.Close() }()
	buf := make([]byte, 1<<16)
	for {
		n, err := server.Read(buf)
		if err != nil {
			return
		}
		if part := h.part.Swap(nil); part != nil {
			_, _ = client.Write((*part)(buf[:n]))
			return
		}
		if _, err := client.Write(buf[:n]); err != nil {
			return
		}
	}
}

// poolerLostServer is what a pooler may say that keeps its client when the
// server's connection breaks: an ordinary error, and ready for the next query.
var poolerLostServer = []byte("E\x00\x00\x00\x27SERROR\x00VERROR\x00C08006\x00Mserver lost\x00\x00Z\x00\x00\x00\x05I")

// The connection ends while COMMIT is being answered. The tag of COMMIT is an
// answer, also where nothing follows it.
func TestHangUpDuringCommit(t *testing.T) {
	t.Parallel()
	const readyForQuery = 6 // bytes
	for name, test := range map[string]struct {
		part  func(answer []byte) []byte
		known bool
	}{
		"nothing arrives":  {func([]byte) []byte { return nil }, false},
		"a part arrives":   {func(b []byte) []byte { return b[:4] }, false},
		"a pooler answers": {func([]byte) []byte { return poolerLostServer }, false},
		"the tag arrives":  {func(b []byte) []byte { return b[:len(b)-readyForQuery] }, true},
	} {
		for kind, work := range map[string]func(ctx context.Context, tx pgx.Tx) error{
			"": func(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, 1) },
			", with AtCommit": func(_ context.Context, tx pgx.Tx) error {
				txretry.AtCommit(tx, addSQL, 1)
				return nil
			},
		} {
			t.Run(name+kind, func(t *testing.T) {
				t.Parallel()
				direct := newCounter(t)
				u, err := url.Parse(direct.Config().ConnString())
				if err != nil {
					t.Fatal(err)
				}
				l, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					t.Fatal(err)
				}
				relay := &hangUp{target: u.Host}
				go relay.serve(l)
				t.Cleanup(func() { _ = l.Close() })
				u.Host = l.Addr().String()
				m := newManager(t, pgtest.Pool(t, u.String(), 1), txretry.Config{})
				m.SetWaits(time.Minute, time.Minute)            // a BEGIN that is sent again has nothing prepared
				if err := m.Do(t.Context(), work); err != nil { // statements are prepared
					t.Fatal(err)
				}
				committed := false
				err = m.Do(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
					txretry.AfterCommit(tx, func() { committed = true })
					defer relay.part.Store(&test.part)
					return work(ctx, tx)
				})
				if test.known != (err == nil) || test.known != committed {
					t.Errorf("error %v, AfterCommit ran: %v", err, committed)
				}
				if !test.known {
					wantUnknown(t, err)
				}
				wantCounter(t, direct, 2)
			})
		}
	}
}
