package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/modules/operator"
	"github.com/holdfast-go/holdfast/modules/operator/agents"
	"github.com/holdfast-go/holdfast/modules/operator/internal/core"
	"github.com/holdfast-go/holdfast/modules/operator/page"
)

// pageShutdown bounds how long the command page waits for answers that are under way.
const pageShutdown = 5 * time.Second

// page serves the page to whoever runs the command.
func (o *commands) page() *cobra.Command {
	cmd := &cobra.Command{
		Use: "page", Short: "Serve the operator as a web page, until interrupted", Args: noArguments,
		Long: "Serve the operator as a web page, until interrupted. Everybody who reaches the address is who runs the command, so\n" +
			"leave it at one of this machine, or mount the page in a program that asks who its visitors are.",
	}
	addr := cmd.Flags().String("addr", "127.0.0.1:8970", "`address` to listen on")
	access := addAccessFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := core.Validate(core.Change{By: access.By}); err != nil || access.Change && access.By == "" {
			return core.Mistakef("page: --by must be 1 to 128 bytes without control characters")
		}
		handler, err := page.New(o.Config, page.Config{Authorize: func(r *http.Request) (operator.Access, error) { return *access, direct(r) }})
		if err != nil {
			return err
		}
		listener, err := (&net.ListenConfig{}).Listen(cmd.Context(), "tcp", *addr)
		if err != nil {
			return core.Mistakef("page: --addr: %w", err)
		}
		fmt.Fprintf(cmd.OutOrStdout(), "http://%s/\n", listener.Addr())
		return servePage(cmd.Context(), listener, handler)
	}
	return cmd
}

// servePage serves until ctx ends.
func servePage(ctx context.Context, listener net.Listener, handler *page.Page) error {
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 2 * time.Minute,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 128 << 10, ErrorLog: slog.NewLogLogger(slog.Default().Handler(), slog.LevelWarn),
	}
	server.RegisterOnShutdown(handler.Close)
	defer handler.Close() // what it has begun is noted before the process ends
	ended := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pageShutdown)
		defer cancel()
		ended <- server.Shutdown(ctx)
	})
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-ended
}

// direct refuses a request under a name that is not this machine's own. A site that has its name lead to a
// visitor's own machine would otherwise count as the page itself: DNS rebinding.
func direct(r *http.Request) error {
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = r.Host
	}
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" {
		return nil
	}
	return fmt.Errorf("operator: the page has no name %.100q: use its address", host)
}

// mcp serves agents on the standard input and output.
func (o *commands) mcp() *cobra.Command {
	cmd := &cobra.Command{
		Use: "mcp", Short: "Serve agents by the Model Context Protocol, on the standard input and output", Args: noArguments,
		Long: "Serve agents by the Model Context Protocol, on the standard input and output, until that ends. An agent may read all but\n" +
			"bodies and headers, and change nothing, unless a flag allows it.",
	}
	access := addAccessFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		server, err := agents.New(o.Config, agents.Config{Access: *access})
		if err != nil {
			return core.Mistakef("mcp: --by must be 1 to 128 bytes without control characters")
		}
		return server.Run(cmd.Context(), &mcp.IOTransport{Reader: io.NopCloser(cmd.InOrStdin()), Writer: unclosed{cmd.OutOrStdout()}})
	}
	return cmd
}

// addAccessFlags adds the flags that say what others may do.
func addAccessFlags(cmd *cobra.Command) *operator.Access {
	access := &operator.Access{}
	cmd.Flags().BoolVar(&access.Bodies, "bodies", false, "allow to look at the bodies and the headers of messages")
	cmd.Flags().BoolVar(&access.Change, "change", false, "allow to change something, such as to retry and drop dead letters")
	cmd.Flags().StringVar(&access.By, "by", osUser(), "`who` does it; kept in the log")
	return access
}

// unclosed is a writer of somebody else.
type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }
