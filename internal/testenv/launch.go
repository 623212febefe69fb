package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Launch starts a private server and returns when it answers. The caller must Close it.
// Extra are further command-line arguments for Postgres ("-c", "max_connections=5") and
// Redis ("--appendonly", "yes"), lines of rabbitmq.conf for RabbitMQ, for PgBouncer the
// address of its Postgres, then lines of pgbouncer.ini, and for Prometheus the lines of prometheus.yml.
// The error is ErrNotInstalled when there are no binaries.
func Launch(ctx context.Context, kind Kind, extra ...string) (*Server, error) {
	return LaunchSpec(ctx, Spec{Kind: kind, Extra: extra})
}

// Spec says what LaunchSpec starts.
type Spec struct {
	Kind Kind

	// Extra is that of Launch.
	Extra []string

	// Dir is where the server's folder is made; "" means the system's place for temporary files.
	Dir string

	// Env is added to the environment of the server's processes.
	Env []string

	// Host is where the server runs.
	Host Host

	// Follows is the address of another Postgres or Redis, whose standby or replica this one is until
	// Promote. It may be that of a Proxy.
	Follows string
}

// LaunchSpec is Launch with more to say about the server.
func LaunchSpec(ctx context.Context, spec Spec) (*Server, error) {
	const attempts = 3 // another process may take a port between finding and using it
	var err error
	for range attempts {
		var s *Server
		if s, err = launch(ctx, spec); err == nil {
			return s, nil
		}
		if !portTaken(err) {
			break
		}
	}
	return nil, err
}

func launch(ctx context.Context, spec Spec) (_ *Server, err error) {
	e, err := newEngine(spec)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(spec.Dir, "holdfast-")
	if err != nil {
		return nil, fmt.Errorf("testenv: %s: %w", spec.Kind, err)
	}
	s := &Server{kind: spec.Kind, dir: dir, env: spec.Env, enter: spec.Host.Enter, engine: e}
	if !live.add(s) {
		return nil, errors.Join(fmt.Errorf("testenv: %s: the process is ending", spec.Kind), os.RemoveAll(dir))
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if err := e.prepare(ctx, dir); err != nil {
		return nil, fmt.Errorf("testenv: prepare %s: %w", spec.Kind, err)
	}
	return s, s.Start(ctx)
}

func newEngine(spec Spec) (engine, error) {
	switch spec.Kind {
	case Postgres:
		return newPostgres(spec)
	case Redis:
		return newRedis(spec)
	case RabbitMQ:
		return newRabbitMQ(spec)
	case PgBouncer:
		return newPgBouncer(spec)
	case Prometheus:
		return newPrometheus(spec.Extra)
	default:
		return nil, fmt.Errorf("testenv: unknown kind %q", spec.Kind)
	}
}
