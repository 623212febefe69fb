package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// The limits of the public surface: of the root module, and of the modules in modules/, which users install one by one.
// Each name and each field is one more thing for users to learn.
const (
	maxNames, maxFields             = 253, 179
	maxModuleNames, maxModuleFields = 70, 31
)

// surface is the public surface of one package.
type surface struct {
	names  []string // package-level names
	fields []string // fields of the structs whose names end in Config; an embedded struct is one
	leaks  []string // exported declarations that name a type of an internal package
}

// forUsers reports whether a package is for users: no driver, no suite, not internal.
func forUsers(pkg string) bool {
	parts := strings.Split(pkg, "/")
	return parts[0] != "examples" && !slices.ContainsFunc(parts, func(part string) bool {
		return part == "internal" || part == "driver" || part == "engine" || part == "conformance"
	})
}

func TestSurface(t *testing.T) {
	t.Parallel()
	var root, nested surface
	for _, p := range packages(t) {
		if !forUsers(p.name()) {
			continue
		}
		s, err := surfaceOf(p.Dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%-32s %3d names %3d fields", p.name(), len(s.names), len(s.fields))
		for _, leak := range s.leaks {
			t.Errorf("%s.%s names an internal type", p.name(), leak)
		}
		all := &root
		if strings.HasPrefix(p.name(), "modules/") {
			all = &nested
		}
		all.names = append(all.names, s.names...)
		all.fields = append(all.fields, s.fields...)
	}
	root.within(t, "the root module", maxNames, maxFields)
	nested.within(t, "modules", maxModuleNames, maxModuleFields)
}

// within compares the surface with its limits.
func (s *surface) within(t *testing.T, of string, names, fields int) {
	t.Helper()
	t.Logf("%s: %d exported names, %d fields of Config structs", of, len(s.names), len(s.fields))
	if len(s.names) == 0 || len(s.fields) == 0 {
		t.Errorf("%s: nothing was counted", of)
	}
	if len(s.names) > names || len(s.fields) > fields {
		t.Errorf("%s: %d names, %d fields: more than %d, %d", of, len(s.names), len(s.fields), names, fields)
	}
}

// surfaceOf reads the non-test files of one package.
func surfaceOf(dir string) (surface, error) {
	var s surface
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return s, err
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		src, err := os.ReadFile(name)
		if err != nil {
			return s, err
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, src, parser.SkipObjectResolution)
		if err != nil {
			return s, err
		}
		s.add(file)
	}
	slices.Sort(s.names)
	s.names = slices.Compact(s.names) // a name may be in files for several systems
	return s, nil
}

func (s *surface) add(file *ast.File) {
	hidden := internalImports(file)
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			if !decl.Name.IsExported() || !exportedReceiver(decl) {
				continue
			}
			if decl.Recv == nil {
				s.names = append(s.names, decl.Name.Name)
			}
			s.leak(decl.Name.Name, decl.Type, hidden)
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				s.addSpec(spec, hidden)
			}
		}
	}
}

func (s *surface) addSpec(spec ast.Spec, hidden map[string]bool) {
	switch spec := spec.(type) {
	case *ast.ValueSpec:
		for _, name := range spec.Names {
			if name.IsExported() {
				s.names = append(s.names, name.Name)
				s.leak(name.Name, spec.Type, hidden)
			}
		}
	case *ast.TypeSpec:
		if !spec.Name.IsExported() {
			return
		}
		s.names = append(s.names, spec.Name.Name)
		s.leak(spec.Name.Name, spec.Type, hidden)
		if fields, ok := spec.Type.(*ast.StructType); ok && isSettings(spec.Name.Name) {
			for _, field := range fieldsOf(fields) {
				s.fields = append(s.fields, spec.Name.Name+"."+field)
			}
		}
	}
}

// isSettings reports whether users fill in this struct for a constructor.
func isSettings(name string) bool {
	return strings.HasSuffix(name, "Config") || name == "Queue" || name == "Stream"
}

// leak records an exported declaration whose type names an internal package. Unexported fields do not count.
func (s *surface) leak(name string, typ ast.Expr, hidden map[string]bool) {
	if typ == nil {
		return
	}
	found := false
	ast.Inspect(typ, func(n ast.Node) bool {
		if field, ok := n.(*ast.Field); ok && len(field.Names) > 0 && isStructField(typ, field) && !field.Names[0].IsExported() {
			return false
		}
		if selector, ok := n.(*ast.SelectorExpr); ok {
			pkg, ok := selector.X.(*ast.Ident)
			found = found || ok && hidden[pkg.Name]
		}
		return !found
	})
	if found {
		s.leaks = append(s.leaks, name)
	}
}

func isStructField(typ ast.Expr, field *ast.Field) bool {
	of, ok := typ.(*ast.StructType)
	return ok && slices.Contains(of.Fields.List, field)
}

func exportedReceiver(decl *ast.FuncDecl) bool {
	if decl.Recv == nil {
		return true
	}
	typ := decl.Recv.List[0].Type
	if pointer, ok := typ.(*ast.StarExpr); ok {
		typ = pointer.X
	}
	if generic, ok := typ.(*ast.IndexExpr); ok {
		typ = generic.X
	}
	name, ok := typ.(*ast.Ident)
	return ok && name.IsExported()
}

// fieldsOf returns the exported fields of a struct. An embedded field has the name of its type.
func fieldsOf(of *ast.StructType) []string {
	var names []string
	for _, field := range of.Fields.List {
		for _, name := range field.Names {
			if name.IsExported() {
				names = append(names, name.Name)
			}
		}
		if len(field.Names) == 0 {
			names = append(names, "(embedded)")
		}
	}
	return names
}

// shown are the internal packages whose types users see under other names: the cores have aliases for them.
var shown = []string{module + "/internal/deadletter"}

// internalImports returns the names under which a file imports internal packages of this repository, except the shown
// ones.
func internalImports(file *ast.File) map[string]bool {
	hidden := map[string]bool{}
	for _, spec := range file.Imports {
		path, err := strconv.Unquote(spec.Path.Value)
		if err != nil || !isOwn(path) || !strings.Contains(path, "/internal/") || slices.Contains(shown, path) {
			continue
		}
		name := path[strings.LastIndex(path, "/")+1:]
		if spec.Name != nil {
			name = spec.Name.Name
		}
		hidden[name] = true
	}
	return hidden
}

// TestSurface_countsEachKind checks that each kind of declaration is counted.
func TestSurface_countsEachKind(t *testing.T) {
	t.Parallel()
	src := `package p
import "` + module + `/internal/check"
type Finding = check.Findings
type Config struct { A, B int; Other; hidden check.Findings }
type Other struct { C int }
func (Other) Method(check.Findings) {}
func (unseen) Method(check.Findings) {}
const Known, unknown = 1, 2
var Value check.Findings
func New() Other { return Other{} }
`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", src, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	var s surface
	s.add(file)
	if want := []string{"Finding", "Config", "Other", "Known", "Value", "New"}; !slices.Equal(s.names, want) {
		t.Errorf("names %v, want %v", s.names, want)
	}
	if want := []string{"Config.A", "Config.B", "Config.(embedded)"}; !slices.Equal(s.fields, want) {
		t.Errorf("fields %v, want %v", s.fields, want)
	}
	if want := []string{"Finding", "Method", "Value"}; !slices.Equal(s.leaks, want) {
		t.Errorf("internal types in %v, want %v", s.leaks, want)
	}
}
