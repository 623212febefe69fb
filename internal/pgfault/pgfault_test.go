package pgfault

import (
	"bytes"
	"os"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/holdfast-go/holdfast/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Run(m)) }

type encoder interface {
	Encode(dst []byte) ([]byte, error)
}

func encode(messages ...encoder) (b []byte) {
	for _, m := range messages {
		b = must(m.Encode(b))
	}
	return b
}

// Statements and ends of answers are found in bytes that are cut anywhere.
func TestWireInPieces(t *testing.T) {
	t.Parallel()
	client := encode(
		&pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersion30, Parameters: map[string]string{"user": "u"}},
		&pgproto3.Parse{Name: "s1", Query: "INSERT"}, &pgproto3.Describe{ObjectType: 'S', Name: "s1"}, &pgproto3.Sync{},
		&pgproto3.Bind{PreparedStatement: "s1"}, &pgproto3.Execute{}, &pgproto3.Bind{PreparedStatement: "s1"}, &pgproto3.Execute{}, &pgproto3.Sync{},
		&pgproto3.Query{String: "commit"}, &pgproto3.CopyDone{},
	)
	server := encode(
		&pgproto3.AuthenticationOk{}, &pgproto3.BackendKeyData{ProcessID: 77, SecretKey: make([]byte, 4)}, &pgproto3.ReadyForQuery{TxStatus: 'I'}, &pgproto3.ParseComplete{}, &pgproto3.ReadyForQuery{TxStatus: 'T'},
		&pgproto3.CopyInResponse{}, &pgproto3.CommandComplete{CommandTag: []byte("COPY 1")}, &pgproto3.ReadyForQuery{TxStatus: 'E'},
	)
	for size := 1; size < len(client); size++ {
		out := requests{prepared: map[string]string{}, portals: map[string]string{}}
		var executed []string
		answers := 0
		for piece := range slices.Chunk(client, size) {
			sql, n := out.add(piece)
			executed, answers = append(executed, sql...), answers+n
		}
		if want := []string{"INSERT", "INSERT", "commit", "the end of COPY"}; !slices.Equal(executed, want) || answers < 3 || answers > 4 {
			t.Errorf("in pieces of %d: %q, %d answers", size, executed, answers) // 4: with the Sync that executes nothing
		}
		var in replies
		ended := 0
		for piece := range slices.Chunk(server, size) {
			ended += in.add(piece)
		}
		if ended != 4 || in.status != 'E' || in.backend != 77 {
			t.Errorf("in pieces of %d: %d answers, status %c, process %d", size, ended, in.status, in.backend)
		}
	}
}

// A rejection contains an answer for each one that the client waits for.
func TestRefusal(t *testing.T) {
	t.Parallel()
	b := refusal("57014", "too slow", 'E', 2)
	frontend := pgproto3.NewFrontend(bytes.NewReader(b), nil)
	for range 2 {
		said, err := frontend.Receive()
		if refused, ok := said.(*pgproto3.ErrorResponse); err != nil || !ok || refused.Code != "57014" || refused.Message != "too slow" {
			t.Fatalf("%#v, error %v", said, err)
		}
		said, err = frontend.Receive()
		if ready, ok := said.(*pgproto3.ReadyForQuery); err != nil || !ok || ready.TxStatus != 'E' {
			t.Fatalf("%#v, error %v", said, err)
		}
	}
}

// A step knows whether it is in a transaction and whether it ends one. A ping is no step.
func TestStepOf(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		sql             []string
		status          byte
		none            bool
		outside, commit bool
	}{
		{sql: []string{"-- ping"}, status: 'I', none: true},
		{sql: []string{""}, status: 'I', none: true},
		{sql: []string{"INSERT"}, status: 'I', outside: true},
		{sql: []string{"INSERT"}, status: 'T'},
		{sql: []string{" Begin isolation level serializable", "INSERT"}, status: 'I'},
		{sql: []string{"START  TRANSACTION"}, status: 'I'},
		{sql: []string{"beginning"}, status: 'I', outside: true},
		{sql: []string{"INSERT", "COMMIT ;"}, status: 'T', commit: true},
		{sql: []string{"insert; commit"}, status: 'T', commit: true},
		{sql: []string{"SELECT commit"}, status: 'T'},
	} {
		step, ok := stepOf(tt.sql, tt.status)
		if ok == tt.none || step.Outside != tt.outside || step.Commit != tt.commit {
			t.Errorf("%q in %c: %+v, %v", tt.sql, tt.status, step, ok)
		}
	}
}
