package operator

import (
	"io"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/spf13/cobra"
)

// mcp serves agents on the standard input and output.
func (o *Operator) mcp() *cobra.Command {
	cmd := &cobra.Command{
		Use: "mcp", Short: "Serve agents by the Model Context Protocol, on the standard input and output", Args: noArguments,
		Long: "Serve agents by the Model Context Protocol, on the standard input and output, until that ends. An agent may read all but\n" +
			"bodies and headers, and change nothing, unless a flag allows it.",
	}
	access := addAccessFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		server, err := o.MCP(MCPConfig{Access: *access})
		if err != nil {
			return usagef("mcp: --by must be 1 to 128 bytes without control characters")
		}
		return server.Run(cmd.Context(), &mcp.IOTransport{Reader: io.NopCloser(cmd.InOrStdin()), Writer: unclosed{cmd.OutOrStdout()}})
	}
	return cmd
}

// addAccessFlags adds the flags that say what others may do.
func addAccessFlags(cmd *cobra.Command) *Access {
	access := &Access{}
	cmd.Flags().BoolVar(&access.Bodies, "bodies", false, "allow to look at the bodies and the headers of messages")
	cmd.Flags().BoolVar(&access.Change, "change", false, "allow to change something, such as to retry and drop dead letters")
	cmd.Flags().StringVar(&access.By, "by", osUser(), "`who` does it; kept in the log")
	return access
}

// unclosed is a writer of somebody else.
type unclosed struct{ io.Writer }

func (unclosed) Close() error { return nil }
