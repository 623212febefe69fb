package archtest_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
)

var (
	commentLine = regexp.MustCompile(`(?m)^\s*//.*$`)
	headless    = regexp.MustCompile(`(?i)\bwhat\b`)
	generated   = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)
)

// mostWhat is the largest share of comment lines that may contain the word "what". Such lines are mostly clauses
// without a noun, which are hard to read.
const mostWhat = 0.01

// TestComments_nameThings counts the word in the comments of the whole repository.
func TestComments_nameThings(t *testing.T) {
	t.Parallel()
	lines, found := 0, map[string]int{}
	total := 0
	for _, file := range files(t, ".go") {
		text := read(t, file)
		if generated.MatchString(text) {
			continue
		}
		for _, line := range commentLine.FindAllString(text, -1) {
			lines++
			if headless.MatchString(line) {
				found[file]++
				total++
			}
		}
	}
	if share := float64(total) / float64(lines); share > mostWhat {
		t.Errorf(`%d of %d comment lines, %.1f %%, contain the word "what"; at most %.0f %% may`, total, lines, 100*share, 100*mostWhat)
		for file, n := range found {
			t.Logf("%4d %s", n, strings.TrimPrefix(file, "../../"))
		}
	}
}

// mostLogWords is how many words a log message may have. Values belong in attributes.
const mostLogWords = 8

// TestLogMessages_shape checks the constant messages that are passed to log/slog, by the names of its methods.
func TestLogMessages_shape(t *testing.T) {
	t.Parallel()
	for _, file := range files(t, ".go") {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		complaints, err := checkLogs(file, read(t, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, complaint := range complaints {
			t.Error(strings.TrimPrefix(complaint, "../../"))
		}
	}
}

func TestLogMessages_findsBadOnes(t *testing.T) {
	t.Parallel()
	for call, bad := range map[string]bool{
		`l.Info("relay lease expired", "key", k)`:                                                 false,
		`l.InfoContext(ctx, "Relay lease expired")`:                                               true,
		`slog.Warn("one two three four five six seven eight nine")`:                               true,
		`l.Log(ctx, slog.LevelInfo, "AMQP connection lost")`:                                      false,
		`l.LogAttrs(ctx, level, "Connection lost")`:                                               true,
		`l.Error("it failed. Restart it")`:                                                        true,
		`t.Error("A message of a test")`:                                                          false,
		`http.Error(w, "Not Found", 404)`:                                                         false,
		`l.Warn(kind)`:                                                                            false,
		`l.Warn("could not move message: " + reason)`:                                             true,
		`l.Warn(core + "pgx: pruning failed")`:                                                    false,
		`l.WarnContext(ctx, "skipped Redis duplicate check", slog.Any("error", errors.New("X")))`: false,
	} {
		complaints, err := checkLogs("a.go", "package p\n\nfunc f() {\n"+call+"\n}\n")
		if err != nil {
			t.Fatal(err)
		}
		if (len(complaints) > 0) != bad {
			t.Errorf("%s: %q", call, complaints)
		}
	}
}

// prefix is the package's name before a message.
var prefix = regexp.MustCompile(`^[a-z]+: `)

func isText(e ast.Expr) bool {
	literal, ok := e.(*ast.BasicLit)
	return ok && literal.Kind == token.STRING
}

// logCalls are the methods of slog.Logger, and of our helpers around it.
var logCalls = []string{"Debug", "Info", "Warn", "Error", "DebugContext", "InfoContext", "WarnContext", "ErrorContext", "Log", "LogAttrs"}

// message returns the argument that is the message: the first that is a text. It follows a context, a level or the key of a limit.
func message(args []ast.Expr) ast.Expr {
	for _, arg := range args[:min(3, len(args))] {
		switch arg := arg.(type) {
		case *ast.BinaryExpr:
			return arg
		case *ast.BasicLit:
			if isText(arg) {
				return arg
			}
		}
	}
	return nil
}

func checkLogs(name, text string) (complaints []string, err error) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, name, text, 0)
	if err != nil {
		return nil, err
	}
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		method, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if !slices.Contains(logCalls, method.Sel.Name) {
			return true
		}
		if on, ok := method.X.(*ast.Ident); ok && slices.Contains([]string{"t", "tb", "b", "http", "status", "connect"}, on.Name) {
			return true
		}
		complain := func(why string) {
			complaints = append(complaints, set.Position(call.Pos()).String()+": log message "+why)
		}
		text := message(call.Args)
		if joined, ok := text.(*ast.BinaryExpr); ok {
			if text = joined.Y; !isText(text) { // a prefix of the package may be put before a text
				complain("ends with a variable; use attributes")
				return true
			}
		}
		literal, ok := text.(*ast.BasicLit)
		if !ok {
			return true
		}
		message, err := strconv.Unquote(literal.Value)
		if err != nil {
			return true
		}
		words := strings.Fields(prefix.ReplaceAllString(message, ""))
		switch {
		case len(words) == 0:
			complain("is empty")
		case len(words) > mostLogWords:
			complain(strconv.Quote(message) + " has more than 8 words")
		case strings.Contains(message, ". ") || strings.HasSuffix(message, "."):
			complain(strconv.Quote(message) + " is more than one sentence")
		case capitalised(words[0]):
			complain(strconv.Quote(message) + " starts with a capital letter")
		}
		return true
	})
	return complaints, nil
}

// capitalised reports whether a word is written like the first of a sentence. An abbreviation or a type's name is not.
func capitalised(word string) bool {
	runes := []rune(word)
	if !unicode.IsUpper(runes[0]) {
		return false
	}
	rest := string(runes[1:])
	return rest == strings.ToLower(rest) && !slices.Contains(names, word)
}

// names are written with a capital letter anywhere.
var names = []string{"Postgres", "Redis", "RabbitMQ", "Symfony", "Check", "Setup", "Run", "Migrate"}
