package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"
)

const (
	quickstart = "../../examples/quickstart/main.go"
	// maxQuickstart is the maximum number of lines of main and serve together.
	maxQuickstart = 36
	// maxReadme is the maximum number of lines of the README: a screen and a half.
	maxReadme = 75
)

// TestQuickstartIsShort counts the lines of a complete service: the functions that build its parts
// and run them.
func TestQuickstartIsShort(t *testing.T) {
	t.Parallel()
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, quickstart, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	lines, found := 0, 0
	for _, decl := range file.Decls {
		if fn, ok := decl.(*ast.FuncDecl); ok && (fn.Name.Name == "main" || fn.Name.Name == "serve") {
			found++
			lines += fset.Position(fn.End()).Line - fset.Position(fn.Pos()).Line + 1
		}
	}
	t.Logf("main and serve have %d lines", lines)
	if found != 2 || lines > maxQuickstart {
		t.Errorf("%d functions of %d lines, want main and serve with at most %d", found, lines, maxQuickstart)
	}
}

// TestReadmeIsShort counts the lines of the README.
func TestReadmeIsShort(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(string(readme), "\n"); lines > maxReadme {
		t.Errorf("README.md has %d lines, at most %d are allowed", lines, maxReadme)
	}
}
