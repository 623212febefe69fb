package faults_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/holdfast-go/holdfast/idempotency"
	"github.com/holdfast-go/holdfast/internal/pgtest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

// The process is killed at every single step that a request takes on the wire, one after the
// other; then the client asks another process. A machine that stalls for longer than the lease has it
// lost before that step: the step is tried again.
func TestIdempotencyProcessKilled(t *testing.T) {
	t.Parallel()
	for _, gate := range []string{redisGate, postgresGate, noGate, alone} {
		t.Run(gate, func(t *testing.T) {
			t.Parallel()
			job := stackJob{Database: pgtest.URL(t), Redis: redistest.URL(t), Gate: gate}
			migrateStack(t, job.Database)
			s, err := openStack(t.Context(), job, nil)
			must(t, err)
			t.Cleanup(s.close)
			kills, lost := 0, 0
			for job.KillAt = 1; ; job.KillAt++ {
				job.Key = idempotency.NewKey()
				c := spawn(t, "idempotency", job)
				<-c.ended
				before := answerOf(t, c)
				s.verify(t, fmt.Sprint("killed at step ", job.KillAt), job.Key, before)
				if c.err == nil { // there was no such step
					break
				}
				if lost < 5 && strings.Contains(c.errors.String(), "answer 503 ") {
					lost++
					job.KillAt--
					continue
				}
				lost = 0
				if status, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
					t.Fatalf("the child was not killed: %v\n%s", c.err, c.errors.String())
				}
				kills++
			}
			if t.Logf("killed at %d steps", kills); kills < 10 {
				t.Error("a request takes more steps than that")
			}
		})
	}
}

// answerOf is what the child's client got, if it lived to see it.
func answerOf(t testing.TB, c *child) string {
	t.Helper()
	line, _, _ := strings.Cut(string(bytes.TrimSpace(c.out.rest())), "\n")
	if line == "" {
		return ""
	}
	var answer struct{ Body string }
	must(t, json.Unmarshal([]byte(line), &answer))
	return answer.Body
}

// idempotencyRole sends one request through a stack and dies at the step it is told.
func idempotencyRole(ctx context.Context, text []byte, ready func()) (any, error) {
	var job stackJob
	if err := json.Unmarshal(text, &job); err != nil {
		return nil, err
	}
	s, err := openStack(ctx, job, nil)
	if err != nil {
		return nil, err
	}
	defer s.close()
	if err := s.warm(); err != nil {
		return nil, err
	}
	ready()
	s.steps.fault = func() {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // nothing more happens
	}
	s.steps.arm(job.KillAt)
	rec := s.post(job.Key)
	answer := struct{ Body string }{rec.Body.String()}
	if rec.Code != 201 {
		return nil, fmt.Errorf("answer %d %s", rec.Code, rec.Body)
	}
	if err := json.NewEncoder(os.Stdout).Encode(answer); err != nil {
		return nil, err
	}
	s.steps.step() // the client has its answer
	s.steps.disarm()
	return answer, nil
}
