package archtest_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// longestSleep is the longest sleep of a test outside bubbles. hang is the shortest deadline that only detects a hang;
// it equals testenv.Patience.
const (
	longestSleep = 100 * time.Millisecond
	hang         = 60 * time.Second
)

// TestTiming: no test that runs with every change asserts a time or sleeps for long. Bubbles of testing/synctest and
// nightly tests may. So may a statement, a function or a package of helpers whose comment gives the reason after
// "timing:".
func TestTiming(t *testing.T) {
	t.Parallel()
	sources := map[string]string{}
	helpers := map[string]bool{} // folders of packages that import testing outside their tests
	for _, file := range files(t, ".go") {
		text := read(t, file)
		if strings.HasPrefix(text, "//go:build interop") || strings.HasPrefix(file, "../../internal/lab/nightly/") { // all of it is nightly
			continue
		}
		sources[file] = text
		if !strings.HasSuffix(file, "_test.go") && importsTesting.MatchString(text) {
			helpers[filepath.Dir(file)] = true
		}
	}
	for file := range sources {
		if !strings.HasSuffix(file, "_test.go") && !helpers[filepath.Dir(file)] {
			delete(sources, file)
		}
	}
	complaints, err := checkTiming(sources)
	if err != nil {
		t.Fatal(err)
	}
	for _, complaint := range complaints {
		t.Error(strings.TrimPrefix(complaint, "../../"))
	}
}

var importsTesting = regexp.MustCompile(`(?m)^(import )?\s*"testing"$`)

// TestTiming_findsAssertsOfSpeed: the check finds every way to assert a time.
func TestTiming_findsAssertsOfSpeed(t *testing.T) {
	t.Parallel()
	check := func(snippet string) []string {
		t.Helper()
		complaints, err := checkTiming(map[string]string{"p/a_test.go": "package p\n\nconst long = time.Minute\n\nfunc TestA(t *testing.T) {\n" + snippet + "\n}\n"})
		if err != nil {
			t.Fatalf("%s: %v", snippet, err)
		}
		return complaints
	}
	for _, bad := range []string{
		`if time.Since(start) > 2*time.Second { t.Error() }`,
		`if time.Now().Sub(start) > 2*time.Second { t.Error() }`,
		`if end.Sub(start) > limit { t.Error() }`,
		`if end.After(start.Add(2 * time.Second)) { t.Error() }`,
		`if start.Add(2 * time.Second).Before(end) { t.Error() }`,
		`took := time.Since(start); if took > limit { t.Error() }`,
		`var took = time.Since(start); if took > limit { t.Error() }`,
		`took := time.Since(start); s := took.Seconds(); if s > 2 { t.Error() }`,
		`if time.Since(start).Seconds() > 2 { t.Error() }`,
		`within(t, time.Since(start), 2*time.Second)`,
		`took := time.Since(start); within(t, took, 2*time.Second)`,
		`f := func() time.Duration { return time.Since(start) }; _ = f`,
		`r.took = time.Since(start)`,
		`select { case <-done: case <-time.After(2 * time.Second): t.Error() }`,
		`select { case <-done: case <-time.After(limit): t.Error() }`,
		`ctx, cancel := context.WithTimeout(ctx, 2*time.Second); defer cancel(); if err := f(ctx); err != nil { t.Error(err) }`,
		`ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Second, errSlow); defer cancel(); _ = ctx`,
		`deadline := time.Now().Add(2 * time.Second); _ = deadline`,
		`for time.Since(start) < 2*time.Second { f() }`,
		`timer := time.NewTimer(2 * time.Second); _ = timer`,
		`time.AfterFunc(2*time.Second, func() { t.Error() })`,
		`time.Sleep(2 * time.Second)`,
		`time.Sleep(2e9)`,
		`time.Sleep(d)`,
		`d := 2 * time.Second; time.Sleep(d)`,
		`<-time.After(time.Second)`,
		`t.Run("a", func(t *testing.T) { time.Sleep(2 * time.Second) })`,
	} {
		if len(check(bad)) == 0 {
			t.Errorf("not found: %s", bad)
		}
	}
	for _, good := range []string{
		`time.Sleep(20 * time.Millisecond)`,
		`const d = 20 * time.Millisecond; time.Sleep(d)`,
		`time.Sleep(2 * time.Second) // timing: a reason`,
		"// timing: a reason\ntime.Sleep(2 * time.Second)",
		`synctest.Test(t, func(t *testing.T) { time.Sleep(2 * time.Second) })`,
		`testenv.Nightly(t, "slow"); time.Sleep(2 * time.Second)`,
		`t.Logf("took %v", time.Since(start))`,
		`select { case <-done: case <-time.After(testenv.Patience): t.Error() }`,
		`select { case <-done: case <-time.After(long): t.Error() }`,
		`ctx, cancel := context.WithTimeout(ctx, testenv.Patience); defer cancel(); _ = ctx`,
		`for deadline := time.Now().Add(testenv.Patience); time.Now().Before(deadline); { f() }`,
		`for time.Since(start) < testenv.Patience { f() }`,
		`m := message{At: time.Now().Add(time.Hour), Created: time.Now().Add(-time.Second)}; _ = m`,
	} {
		if complaints := check(good); len(complaints) > 0 {
			t.Errorf("%s: %s", good, complaints)
		}
	}
}

// checkTiming returns the complaints about sources, which maps paths to file contents.
func checkTiming(sources map[string]string) ([]string, error) {
	packages := map[string]*tests{}
	set := token.NewFileSet()
	for _, file := range slices.Sorted(maps.Keys(sources)) {
		syntax, err := parser.ParseFile(set, file, sources[file], parser.SkipObjectResolution|parser.ParseComments)
		if err != nil {
			return nil, err
		}
		name := filepath.Dir(file) + " " + syntax.Name.Name
		p := packages[name]
		if p == nil {
			p = &tests{set: set, bodies: map[string][]*ast.FuncDecl{}, consts: map[string]ast.Expr{}, bubble: map[string]bool{}, seen: map[*ast.FuncDecl]bool{}, subtests: map[*ast.FuncLit]bool{}, reasons: map[string]bool{}}
			packages[name] = p
		}
		p.add(syntax, !strings.HasSuffix(file, "_test.go"))
	}
	var complaints []string
	for _, name := range slices.Sorted(maps.Keys(packages)) {
		p := packages[name]
		if !strings.Contains(name, "/conformance ") { // some of its backends run in bubbles
			p.findBubbles()
		}
		for _, root := range p.roots {
			p.walk(root)
		}
		complaints = append(complaints, p.complaints...)
	}
	return complaints, nil
}

// tests holds the tests of a package and the functions that they may call.
type tests struct {
	complaints []string
	set        *token.FileSet
	roots      []*ast.FuncDecl
	bodies     map[string][]*ast.FuncDecl // functions and methods by their name
	consts     map[string]ast.Expr
	bubble     map[string]bool // helpers that run a function in a bubble
	seen       map[*ast.FuncDecl]bool
	exempt     bool            // the package comment gives a reason, except for the package's own tests
	reasons    map[string]bool // file:line where a comment gives a reason
	// subtests are the functions passed to t.Run.
	subtests map[*ast.FuncLit]bool
}

func (p *tests) add(file *ast.File, helper bool) {
	p.exempt = p.exempt || helper && strings.Contains(file.Doc.Text(), "timing: ")
	for _, comment := range file.Comments {
		if _, reason, ok := strings.Cut(comment.Text(), "timing: "); ok && reason != "" {
			first, last := p.set.Position(comment.Pos()), p.set.Position(comment.End())
			for line := first.Line; line <= last.Line+1; line++ {
				p.reasons[lineOf(first.Filename, line)] = true
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			name := n.Name.Name
			p.bodies[name] = append(p.bodies[name], n)
			if n.Recv == nil && (strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Example") || strings.HasPrefix(name, "Fuzz")) || helper && n.Name.IsExported() {
				p.roots = append(p.roots, n)
			}
		case *ast.GenDecl:
			for _, spec := range n.Specs {
				values, ok := spec.(*ast.ValueSpec)
				if !ok || n.Tok != token.CONST {
					continue
				}
				for i, name := range values.Names {
					if strings.EqualFold(name.Name, "patience") && !helper && slices.Contains(file.Decls, ast.Decl(n)) {
						p.complain(name, "a patience of its own: use testenv.Patience")
					}
					if i < len(values.Values) {
						p.consts[name.Name] = values.Values[i]
					}
				}
			}
		case *ast.SelectorExpr:
			if n.Sel.Name == "InTime" {
				p.complain(n, "InTime asserts a time")
			}
		}
		return true
	})
}

func lineOf(file string, line int) string { return file + ":" + strconv.Itoa(line) }

// complain records a complaint about a node, unless a comment gives a reason on its line or the line above.
func (p *tests) complain(at ast.Node, text string) {
	pos := p.set.Position(at.Pos())
	if !p.reasons[lineOf(pos.Filename, pos.Line)] {
		p.complaints = append(p.complaints, pos.String()+": "+text)
	}
}

// findBubbles finds the functions that take a function and call synctest.Test or another such helper.
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

// walk checks a function and the functions that it names.
func (p *tests) walk(fn *ast.FuncDecl) {
	if p.seen[fn] || fn.Body == nil || strings.Contains(fn.Doc.Text(), "timing: ") {
		return
	}
	if p.exempt && !strings.HasSuffix(p.set.Position(fn.Pos()).Filename, "_test.go") {
		return
	}
	p.seen[fn] = true
	v := p.variables(fn)
	inBubble := p.startsBubble(fn)
	selected := map[ast.Node]bool{} // the cases of a select: they do not sleep, except those that poll
	ast.Inspect(fn.Body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BlockStmt:
			return !nightly(n)
		case *ast.CommClause:
			selected[n.Comm] = true
			if poll := pollOf(n); poll != nil {
				d, known := p.duration(poll.Args[0], v)
				selected[poll] = known && d <= longestSleep
			}
		case *ast.FuncLit: // literals in tables and variables run in the bubble, those of t.Run do not
			return !inBubble || p.subtests[n]
		}
		return selected[n] || p.check(n, v)
	})
}

// pollOf returns the timer of a select case that only waits for it, or nil.
func pollOf(c *ast.CommClause) *ast.CallExpr {
	if wait, ok := c.Comm.(*ast.ExprStmt); ok && len(c.Body) == 0 {
		if receive, ok := wait.X.(*ast.UnaryExpr); ok && isCall(receive.X, "time", "After") {
			return receive.X.(*ast.CallExpr)
		}
	}
	return nil
}

// variables holds the local variables of a function by name.
type variables struct {
	elapsed map[string]bool     // hold an elapsed time
	values  map[string]ast.Expr // are assigned once
}

func (p *tests) variables(fn *ast.FuncDecl) variables {
	v := variables{map[string]bool{}, map[string]ast.Expr{}}
	assign := func(to ast.Expr, value ast.Expr, fresh bool) {
		name, ok := to.(*ast.Ident)
		if !ok || name.Name == "_" {
			return
		}
		if v.measured(value) {
			v.elapsed[name.Name] = true
		}
		if _, again := v.values[name.Name]; again || !fresh {
			value = nil // its value depends on where it is read
		}
		v.values[name.Name] = value
	}
	ast.Inspect(fn.Body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			for i, to := range n.Lhs {
				if len(n.Lhs) == len(n.Rhs) {
					assign(to, n.Rhs[i], n.Tok == token.DEFINE)
				}
			}
		case *ast.ValueSpec:
			for i, to := range n.Names {
				if i < len(n.Values) {
					assign(to, n.Values[i], true)
				}
			}
		}
		return true
	})
	return v
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

// check records how a node uses the clock, and reports whether to descend into it.
func (p *tests) check(n ast.Node, v variables) bool {
	switch n := n.(type) {
	case *ast.CallExpr:
		if p.isBubble(n) {
			return false
		}
		p.checkCall(n, v)
	case *ast.ExprStmt:
		if wait, ok := n.X.(*ast.UnaryExpr); ok && isCall(wait.X, "time", "After") {
			p.checkSleep(n, wait.X.(*ast.CallExpr).Args[0], v)
			return false
		}
	case *ast.AssignStmt:
		for i, to := range n.Lhs {
			if _, local := to.(*ast.Ident); !local && len(n.Lhs) == len(n.Rhs) && v.measured(n.Rhs[i]) {
				p.complain(n, "stores an elapsed time")
			}
		}
	case *ast.ReturnStmt:
		if slices.ContainsFunc(n.Results, v.isMeasured) {
			p.complain(n, "returns an elapsed time")
		}
	case *ast.BinaryExpr:
		if compares(n.Op) && (v.measured(n.X) && !p.detectsHang(n.Y, v) || v.measured(n.Y) && !p.detectsHang(n.X, v)) {
			p.complain(n, "compares an elapsed time with a bound")
		}
	case *ast.Ident:
		for _, called := range p.bodies[n.Name] {
			p.walk(called)
		}
	}
	return true
}

func (p *tests) checkCall(call *ast.CallExpr, v variables) {
	deadline := func(d ast.Expr, of string) {
		if !p.detectsHang(d, v) {
			p.complain(call, of+" that is not testenv.Patience")
		}
	}
	method, ok := call.Fun.(*ast.SelectorExpr)
	switch {
	case isCall(call, "time", "Sleep"):
		p.checkSleep(call, call.Args[0], v)
	case isCall(call, "time", "After"), isCall(call, "time", "NewTimer"), isCall(call, "time", "AfterFunc"):
		deadline(call.Args[0], "a timer")
	case isCall(call, "context", "WithTimeout"), isCall(call, "context", "WithTimeoutCause"):
		deadline(call.Args[1], "a timeout")
	case ok && method.Sel.Name == "Add" && isCall(method.X, "time", "Now"):
		if d, known := p.duration(call.Args[0], v); !known || d > 0 && d < hang { // other values are not deadlines
			deadline(call.Args[0], "a deadline")
		}
	case ok && (method.Sel.Name == "After" || method.Sel.Name == "Before" || method.Sel.Name == "Compare") && len(call.Args) == 1:
		for _, side := range []ast.Expr{method.X, call.Args[0]} {
			if sum, ok := side.(*ast.CallExpr); ok && isMethod(sum, "Add") && !p.detectsHang(sum.Args[0], v) {
				p.complain(call, "compares a time with a bound")
			}
		}
	case ok && prints(method):
	default:
		if slices.ContainsFunc(call.Args, v.isMeasured) {
			p.complain(call, "passes an elapsed time on")
		}
	}
}

// prints reports whether a function only formats or logs its arguments.
func prints(f *ast.SelectorExpr) bool {
	if from, ok := f.X.(*ast.Ident); ok && (from.Name == "fmt" || from.Name == "log" || from.Name == "slog") {
		return true
	}
	return slices.Contains([]string{"Log", "Logf", "Error", "Errorf", "Fatal", "Fatalf", "Skip", "Skipf"}, f.Sel.Name)
}

func (p *tests) checkSleep(at ast.Node, d ast.Expr, v variables) {
	if sleep, ok := p.duration(d, v); !ok {
		p.complain(at, "sleeps for a time that is not a constant")
	} else if sleep > longestSleep {
		p.complain(at, "sleeps for "+sleep.String())
	}
}

// detectsHang reports whether a deadline is testenv.Patience or longer.
func (p *tests) detectsHang(e ast.Expr, v variables) bool {
	d, ok := p.duration(e, v)
	return ok && d >= hang
}

func compares(op token.Token) bool {
	return op == token.LSS || op == token.GTR || op == token.LEQ || op == token.GEQ || op == token.EQL || op == token.NEQ
}

// nightly reports whether a block calls testenv.Nightly directly, not in a nested block.
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

func isMethod(call *ast.CallExpr, name string) bool {
	f, ok := call.Fun.(*ast.SelectorExpr)
	return ok && f.Sel.Name == name && len(call.Args) == 1
}

// isMeasured reports whether an expression is an elapsed time, in any unit.
func (v variables) isMeasured(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.Ident:
		return v.elapsed[e.Name]
	case *ast.BinaryExpr:
		return !compares(e.Op) && (v.isMeasured(e.X) || v.isMeasured(e.Y))
	case *ast.ParenExpr:
		return v.isMeasured(e.X)
	case *ast.CallExpr:
		if isCall(e, "time", "Since") || isMethod(e, "Sub") {
			return true
		}
		if f, ok := e.Fun.(*ast.SelectorExpr); ok && v.isMeasured(f.X) { // such as Seconds
			return true
		}
		return len(e.Args) == 1 && v.isMeasured(e.Args[0]) // a conversion
	}
	return false
}

// measured is isMeasured, but e may be nil.
func (v variables) measured(e ast.Expr) bool { return e != nil && v.isMeasured(e) }

// duration returns the value of a constant, such as 2*time.Second, and whether it is known.
func (p *tests) duration(e ast.Expr, v variables) (time.Duration, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		n, err := strconv.ParseFloat(e.Value, 64)
		return time.Duration(n), err == nil
	case *ast.ParenExpr:
		return p.duration(e.X, v)
	case *ast.Ident:
		if value, local := v.values[e.Name]; local {
			return p.duration(value, v)
		}
		if value := p.consts[e.Name]; value != nil {
			return p.duration(value, v)
		}
	case *ast.SelectorExpr:
		if isName(e, "testenv", "Patience") || isName(e, "suite", "Patience") {
			return hang, true
		}
		units := map[string]time.Duration{"Nanosecond": 1, "Microsecond": time.Microsecond, "Millisecond": time.Millisecond, "Second": time.Second, "Minute": time.Minute, "Hour": time.Hour}
		unit, ok := units[e.Sel.Name]
		return unit, ok && isName(e, "time", e.Sel.Name)
	case *ast.UnaryExpr:
		x, ok := p.duration(e.X, v)
		return -x, ok && e.Op == token.SUB
	case *ast.BinaryExpr:
		x, ok := p.duration(e.X, v)
		y, also := p.duration(e.Y, v)
		switch e.Op {
		case token.MUL:
			return x * y, ok && also
		case token.ADD:
			return x + y, ok && also
		case token.SUB:
			return x - y, ok && also
		case token.QUO:
			return x / max(y, 1), ok && also
		}
	case *ast.CallExpr:
		if isName(e.Fun, "time", "Duration") {
			return p.duration(e.Args[0], v)
		}
		for _, random := range []string{"N", "IntN", "Int64N"} { // the longest counts
			if isName(e.Fun, "rand", random) {
				return p.duration(e.Args[0], v)
			}
		}
	}
	return 0, false
}
