package silent

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

// Postgres is a server that falls silent. It must be used in the bubble that made it.
type Postgres struct {
	network
	url string // of the real server; "": the script answers

	// Answer scripts the answer to a statement: a row of text columns, separated by commas, or an error. "" is no row.
	// It is called from any goroutine.
	Answer func(sql string) (value string, err *pgproto3.ErrorResponse)
	// Hangup scripts the end of a connection that sends COMMIT: the client gets a part of the answer, then the
	// connection ends. It is called once.
	Hangup func(answer []byte) []byte

	effects int // statements "update" of committed transactions
}

// SilenceOn makes the next connections that x describes fall silent, once every goroutine of the bubble is at rest,
// so that the background work of an earlier call does not trigger it.
func (s *Postgres) SilenceOn(x testenv.Silence) {
	synctest.Wait()
	s.network.SilenceOn(x)
}

// NewPostgres returns a server that forwards requests to the one of the address, or answers from a script if that is "".
func NewPostgres(t testing.TB, url string) *Postgres {
	s := &Postgres{url: url}
	s.init(t)
	return s
}

// Config returns the configuration of a pool. Its statements use the simple protocol on a script.
func (s *Postgres) Config(t testing.TB, conns int) *pgxpool.Config {
	t.Helper()
	url := s.url
	if url == "" {
		url = "postgres://u@127.0.0.1:1/db?sslmode=disable&default_query_exec_mode=simple_protocol"
	}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = int32(conns)
	cfg.ConnConfig.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	cfg.ConnConfig.DialFunc = func(_ context.Context, _, addr string) (net.Conn, error) {
		return s.dial(func(c *conn) error { return s.serve(c, addr) })
	}
	return cfg
}

// Pool opens a pool that the end of the test closes.
func (s *Postgres) Pool(t testing.TB, conns int) *pgxpool.Pool { return s.Open(t, s.Config(t, conns)) }

// Open opens the pool of a configuration.
func (s *Postgres) Open(t testing.TB, cfg *pgxpool.Config) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Heal() // for calls on silent connections
		pool.Close()
	})
	return pool
}

// Effects returns how many "update" statements have committed on the script.
func (s *Postgres) Effects() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.effects
}

// cancelRequest is the code of a startup that cancels a statement of another connection.
const cancelRequest = 80877102

// serve answers one client. Everything that the client sends before it waits for an answer is one request.
func (s *Postgres) serve(c *conn, addr string) error {
	request, err := readFrame(c, false)
	if err != nil {
		return err
	}
	exchange := (&script{Postgres: s, status: 'I'}).exchange
	if s.url != "" {
		server, err := c.upstream(addr)
		if err != nil {
			return err
		}
		exchange = (&relay{conn: c, server: server}).exchange
	}
	for {
		if c.arrives(request) {
			reply, failed := exchange(request)
			hangup := s.hangsUp(request)
			if hangup != nil {
				reply, failed = hangup(reply), io.EOF
			}
			if err := errors.Join(c.answer(reply), failed); err != nil {
				return err
			}
		}
		c.forgotten()
		request = nil
		for frame := []byte{0}; !bytes.Contains([]byte("QScfpX"), frame[:1]); request = append(request, frame...) {
			if frame, err = readFrame(c, true); err != nil {
				return err
			}
		}
	}
}

func (s *Postgres) hangsUp(request []byte) func([]byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Hangup == nil || !bytes.Contains(request, []byte("commit")) {
		return nil
	}
	hangup := s.Hangup
	s.Hangup = nil
	return hangup
}

// readFrame reads one message. Startup messages have no type.
func readFrame(r io.Reader, typed bool) ([]byte, error) {
	head := make([]byte, 4, 64)
	if typed {
		head = head[:5]
	}
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	size := int(binary.BigEndian.Uint32(head[len(head)-4:])) - 4
	frame := append(head, make([]byte, size)...)
	_, err := io.ReadFull(r, frame[len(head):])
	return frame, err
}

// relay forwards the requests of one connection to a real server.
type relay struct {
	conn   *conn
	server net.Conn

	mu        sync.Mutex // held while a request is at the server
	listening bool
}

func (r *relay) exchange(request []byte) ([]byte, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	reply, err := r.forward(request)
	if !r.listening && bytes.Contains(bytes.ToUpper(request), []byte("LISTEN ")) {
		r.listening = true
		go r.poll()
	}
	return reply, err
}

// poll asks the server for notifications twenty times a second. A blocking read would stop the clock.
func (r *relay) poll() {
	empty, _ := (&pgproto3.Query{}).Encode(nil)
	for {
		select {
		case <-r.conn.done:
			return
		case <-time.After(50 * time.Millisecond):
		}
		if !r.conn.arrives(nil) {
			return
		}
		r.mu.Lock()
		reply, err := r.forward(empty)
		r.mu.Unlock()
		var notifications []byte
		for len(reply) > 0 {
			size := 1 + int(binary.BigEndian.Uint32(reply[1:]))
			if reply[0] == 'A' {
				notifications = append(notifications, reply[:size]...)
			}
			reply = reply[size:]
		}
		if err != nil || r.conn.answer(notifications) != nil {
			return
		}
	}
}

// forward sends a request to the server and returns the answer up to the client's next turn.
func (r *relay) forward(request []byte) ([]byte, error) {
	if _, err := r.server.Write(request); err != nil {
		return nil, err
	}
	if request[0] == 'X' {
		return nil, io.EOF
	}
	var reply []byte
	for in := bufio.NewReader(r.server); ; {
		frame, err := readFrame(in, true)
		if err != nil {
			return reply, err // after a request to cancel, or a fatal error
		}
		reply = append(reply, frame...)
		asks := frame[0] == 'G' // the client copies rows
		if frame[0] == 'R' {
			code := binary.BigEndian.Uint32(frame[5:])
			asks = code != 0 && code != 12 // a password, or a part of it
		}
		if asks || frame[0] == 'Z' {
			return reply, nil
		}
	}
}

// script answers one connection.
type script struct {
	*Postgres
	status   byte
	updates  int
	prepared string                    // the statement that the client has sent last
	portal   []pgproto3.BackendMessage // its answer after the description
}

func (s *script) exchange(request []byte) (reply []byte, err error) {
	if request[0] == 0 { // the startup, or a request to cancel
		if binary.BigEndian.Uint32(request[4:]) == cancelRequest {
			return nil, io.EOF
		}
		return s.send(nil, &pgproto3.AuthenticationOk{}, &pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}},
			&pgproto3.ParameterStatus{Name: "standard_conforming_strings", Value: "on"}, &pgproto3.ParameterStatus{Name: "client_encoding", Value: "UTF8"},
			&pgproto3.ReadyForQuery{TxStatus: s.status})
	}
	for len(request) > 0 {
		size := 1 + int(binary.BigEndian.Uint32(request[1:]))
		frame, body := request[:size], request[5:size]
		request = request[size:]
		var answers []pgproto3.BackendMessage
		switch frame[0] {
		case 'X':
			return nil, io.EOF
		case 'Q':
			for part := range strings.SplitSeq(string(body[:len(body)-1]), ";") {
				answers = append(answers, s.run(strings.TrimSpace(part))...)
			}
			answers = append(answers, &pgproto3.ReadyForQuery{TxStatus: s.status})
		case 'P':
			_, sql, _ := bytes.Cut(body, []byte{0})
			s.prepared = string(sql[:bytes.IndexByte(sql, 0)])
			answers = append(answers, &pgproto3.ParseComplete{})
		case 'B':
			answers = append(answers, &pgproto3.BindComplete{})
		case 'D':
			answers = s.run(s.prepared)
			if rows, ok := answers[0].(*pgproto3.RowDescription); ok {
				s.portal, answers = answers[1:], []pgproto3.BackendMessage{rows}
			} else {
				s.portal, answers = answers, []pgproto3.BackendMessage{&pgproto3.NoData{}}
			}
		case 'E':
			answers = s.portal
		case 'S':
			answers = append(answers, &pgproto3.ReadyForQuery{TxStatus: s.status})
		}
		if reply, err = s.send(reply, answers...); err != nil {
			return nil, err
		}
	}
	return reply, nil
}

func (s *script) send(reply []byte, messages ...pgproto3.BackendMessage) (_ []byte, err error) {
	for _, m := range messages {
		if reply, err = m.Encode(reply); err != nil {
			return nil, err
		}
	}
	return reply, nil
}

// run executes one statement.
func (s *script) run(sql string) []pgproto3.BackendMessage {
	if sql == "" || strings.HasPrefix(sql, "--") {
		return []pgproto3.BackendMessage{&pgproto3.EmptyQueryResponse{}}
	}
	word, _, _ := strings.Cut(sql, " ")
	done := &pgproto3.CommandComplete{CommandTag: []byte(strings.ToUpper(word))}
	switch word {
	case "begin":
		s.status = 'T'
	case "commit", "rollback":
		s.status = 'I'
		if word == "commit" {
			s.mu.Lock()
			s.effects += s.updates
			s.mu.Unlock()
		}
		s.updates = 0
	case "update":
		s.updates++
	}
	if s.Answer == nil {
		return []pgproto3.BackendMessage{done}
	}
	switch value, failed := s.Answer(sql); {
	case failed != nil:
		return []pgproto3.BackendMessage{failed}
	case value != "":
		var fields []pgproto3.FieldDescription
		var values [][]byte
		for value := range strings.SplitSeq(value, ",") {
			fields = append(fields, pgproto3.FieldDescription{Name: []byte("value"), DataTypeOID: 25, DataTypeSize: -1, TypeModifier: -1})
			values = append(values, []byte(value))
		}
		return []pgproto3.BackendMessage{&pgproto3.RowDescription{Fields: fields}, &pgproto3.DataRow{Values: values}, done}
	}
	return []pgproto3.BackendMessage{done}
}
