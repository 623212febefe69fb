package archtest_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// mayTakeTime are the functions that sleep or compare a time with every change, each with its reason.
var mayTakeTime = map[string]string{
	"idempotency.Read": "a client of a server in a bubble",
	"idempotency/idempotencypgx.TestDifferentialStores":   "leaves out a sequence that a busy machine made old",
	"expiry/expirypgx.TestOverdue":                        "a deadline of long ago",
	"inbox/engine.Append":                                 "a slow store in a bubble",
	"outbox/outboxpgx.TestChangesOfDeadLettersAreAudited": "the time of an entry",
	"outbox/outboxpgx.TestFunctionIDs":                    "the time of an id",
	"outbox/outboxtest/conformance.renewsLeases":          "waits until a short lease is over",
	"outbox/outboxtest/conformance.renewsNoStaleLease":    "waits until a short lease is over",
	"ratelimit.ExampleNewWaiter":                          "shows that a caller waited",
}

// longestSleep is how long a test may sleep outside bubbles.
const longestSleep = 100 * time.Millisecond

// No test that runs with every change asserts a time or sleeps for long. Bubbles of testing/synctest and nightly
// tests may.
func TestTiming(t *testing.T) {
	t.Parallel()
	packages := map[string]*tests{}
	set := token.NewFileSet()
	for _, file := range files(t, ".go") {
		suite := strings.Contains(file, "/conformance/")
		if !suite && !strings.HasSuffix(file, "_test.go") {
			continue
		}
		text := read(t, file)
		if strings.HasPrefix(text, "//go:build interop") { // its peers are nightly
			continue
		}
		syntax, err := parser.ParseFile(set, file, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		name := filepath.Dir(file) + " " + syntax.Name.Name
		p := packages[name]
		if p == nil {
			p = &tests{t: t, dir: strings.TrimPrefix(filepath.Dir(file), "../../"), set: set, bodies: map[string][]*ast.FuncDecl{}, consts: map[string]ast.Expr{}, bubble: map[string]bool{}, seen: map[*ast.FuncDecl]bool{}, subtests: map[*ast.FuncLit]bool{}}
			packages[name] = p
		}
		p.add(syntax, suite)
	}
	for name, p := range packages {
		if !strings.Contains(name, "/conformance ") { // its backends are in bubbles or not
			p.findBubbles()
		}
		for _, root := range p.roots {
			p.walk(root)
		}
	}
}

// tests are those of a package, with the functions that they may call.
type tests struct {
	t      *testing.T
	dir    string
	set    *token.FileSet
	roots  []*ast.FuncDecl
	bodies map[string][]*ast.FuncDecl // functions and methods by their name
	consts map[string]ast.Expr
	bubble map[string]bool // helpers that run a function in a bubble
	seen   map[*ast.FuncDecl]bool
	// subtests are the functions that t.Run gets.
	subtests map[*ast.FuncLit]bool
}

func (p *tests) add(file *ast.File, suite bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			name := n.Name.Name
			p.bodies[name] = append(p.bodies[name], n)
			if n.Recv == nil && (strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Example") || suite && n.Name.IsExported()) {
				p.roots = append(p.roots, n)
			}
		case *ast.GenDecl:
			for _, spec := range n.Specs {
				values, ok := spec.(*ast.ValueSpec)
				if !ok || n.Tok != token.CONST {
					continue
				}
				for i, name := range values.Names {
					if name.Name == "patience" && !suite && slices.Contains(file.Decls, ast.Decl(n)) {
						p.complain(name.Pos(), "a patience of its own: use testenv.Patience")
					}
					if i < len(values.Values) {
						p.consts[name.Name] = values.Values[i]
					}
				}
			}
		case *ast.SelectorExpr:
			if n.Sel.Name == "InTime" {
				p.complain(n.Pos(), "InTime asserts a time")
			}
		}
		return true
	})
}

func (p *tests) complain(at token.Pos, text string) {
	p.t.Helper()
	p.t.Errorf("%s: %s", strings.TrimPrefix(p.set.Position(at).String(), "../../"), text)
}

// findBubbles finds the functions that take a function and call synctest.Test, or another such helper.
func (p *tests) findBubbles() {
	for found := true; found; {
		found = false
		for name, all := range p.bodies {
			for _, fn := range all {
				if p.bubble[name] || fn.Body == nil || !takesFunc(fn) {
					continue
				}
				ast.Inspect(fn.Body, func(n ast.Node) bool {
					if p.isBubble(n) {
						p.bubble[name], found = true, true
					}
					return !p.bubble[name]
				})
			}
		}
	}
}

func takesFunc(fn *ast.FuncDecl) bool {
	return slices.ContainsFunc(fn.Type.Params.List, func(f *ast.Field) bool {
		_, ok := f.Type.(*ast.FuncType)
		return ok
	})
}

// isBubble reports whether a call runs a function in a bubble.
func (p *tests) isBubble(n ast.Node) bool {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return false
	}
	switch f := call.Fun.(type) {
	case *ast.Ident:
		if p.bubble[f.Name] {
			return true
		}
	case *ast.SelectorExpr:
		if p.bubble[f.Sel.Name] || isCall(call, "synctest", "Test") {
			return true
		}
	}
	if isCall(call, "silent", "BothClients") || isCall(call, "silent", "Today") {
		return true
	}
	return slices.ContainsFunc(call.Args, func(arg ast.Expr) bool { return isName(arg, "synctest", "Test") })
}

// walk checks a function and those that it names.
func (p *tests) walk(fn *ast.FuncDecl) {
	if p.seen[fn] || fn.Body == nil || mayTakeTime[p.dir+"."+fn.Name.Name] != "" {
		return
	}
	p.seen[fn] = true
	elapsed := map[string]bool{} // variables that hold a time that has passed
	inBubble := p.startsBubble(fn)
	allowed := map[ast.Node]bool{}
	ast.Inspect(fn.Body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BlockStmt:
			return !nightly(n)
		case *ast.FuncLit: // a table's or a variable's belong to the bubble, those of t.Run do not
			return !inBubble || p.subtests[n]
		case *ast.CommClause:
			allowed[n.Comm] = true // a timeout
		case *ast.ForStmt: // it ends a loop
			if n.Cond != nil {
				ast.Inspect(n.Cond, func(part ast.Node) bool { allowed[part] = true; return true })
			}
		}
		return allowed[n] || p.check(n, elapsed)
	})
}

// startsBubble reports whether a function starts a bubble, and finds its subtests.
func (p *tests) startsBubble(fn *ast.FuncDecl) (found bool) {
	ast.Inspect(fn.Body, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok {
			found = found || p.isBubble(call)
			if f, ok := call.Fun.(*ast.SelectorExpr); ok && f.Sel.Name == "Run" && len(call.Args) == 2 {
				if subtest, ok := call.Args[1].(*ast.FuncLit); ok {
					p.subtests[subtest] = true
				}
			}
		}
		return true
	})
	return found
}

// check reports what a node does with the clock, and whether to look below it.
func (p *tests) check(n ast.Node, elapsed map[string]bool) bool {
	switch n := n.(type) {
	case *ast.CallExpr:
		if p.isBubble(n) {
			return false
		}
		if isCall(n, "time", "Sleep") && p.duration(n.Args[0]) > longestSleep {
			p.complain(n.Pos(), "sleeps for "+p.duration(n.Args[0]).String())
		}
	case *ast.ExprStmt:
		if wait, ok := n.X.(*ast.UnaryExpr); ok && isCall(wait.X, "time", "After") {
			if d := p.duration(wait.X.(*ast.CallExpr).Args[0]); d > longestSleep {
				p.complain(n.Pos(), "sleeps for "+d.String())
			}
		}
	case *ast.AssignStmt:
		for i, value := range n.Rhs {
			if name, ok := n.Lhs[i].(*ast.Ident); ok && isCall(value, "time", "Since") {
				elapsed[name.Name] = true
			}
		}
	case *ast.BinaryExpr:
		if compares(n.Op) && (measured(n.X, elapsed) || measured(n.Y, elapsed)) {
			p.complain(n.Pos(), "compares a time that has passed with a bound")
		}
	case *ast.Ident:
		for _, called := range p.bodies[n.Name] {
			p.walk(called)
		}
	}
	return true
}

func compares(op token.Token) bool {
	return op == token.LSS || op == token.GTR || op == token.LEQ || op == token.GEQ || op == token.EQL || op == token.NEQ
}

// nightly reports whether a block calls testenv.Nightly itself, not in a block within it.
func nightly(body *ast.BlockStmt) (found bool) {
	for _, statement := range body.List {
		if call, ok := statement.(*ast.ExprStmt); ok && isCall(call.X, "testenv", "Nightly") {
			return true
		}
	}
	return false
}

func isCall(n ast.Node, pkg, name string) bool {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return false
	}
	return isName(call.Fun, pkg, name)
}

func isName(e ast.Expr, pkg, name string) bool {
	f, ok := e.(*ast.SelectorExpr)
	if !ok || f.Sel.Name != name {
		return false
	}
	from, ok := f.X.(*ast.Ident)
	return ok && from.Name == pkg
}

// measured reports whether an expression holds a time that has passed.
func measured(e ast.Expr, elapsed map[string]bool) (found bool) {
	ast.Inspect(e, func(n ast.Node) bool {
		if name, ok := n.(*ast.Ident); ok && elapsed[name.Name] || isCall(n, "time", "Since") {
			found = true
		}
		return !found
	})
	return found
}

// duration is the value of a constant, such as 2*time.Second, or 0 of anything else.
func (p *tests) duration(e ast.Expr) time.Duration {
	switch e := e.(type) {
	case *ast.BasicLit:
		n, _ := strconv.Atoi(e.Value)
		return time.Duration(n)
	case *ast.Ident:
		if value := p.consts[e.Name]; value != nil {
			return p.duration(value)
		}
	case *ast.SelectorExpr:
		units := map[string]time.Duration{"Millisecond": time.Millisecond, "Second": time.Second, "Minute": time.Minute, "Hour": time.Hour}
		return units[e.Sel.Name]
	case *ast.BinaryExpr:
		switch x, y := p.duration(e.X), p.duration(e.Y); e.Op {
		case token.MUL:
			return x * y
		case token.ADD:
			return x + y
		}
	}
	return 0
}
