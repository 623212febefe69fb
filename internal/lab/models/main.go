// Command models checks the models of the protocols: every interleaving of a few processes, with faults.
//
//	go run ./internal/lab/models
//	go run ./internal/lab/models -only=floors
//
// A model is a Promela file of this folder, which Spin translates to C. Its head comment lists the functions that it
// abstracts, its properties, and its mutants: plausible bugs, planted with #ifdef, that the check must find. The
// command fails if a property does not hold, if a mutant is not found, if a search was not exhaustive, or if a statement
// of a model is never reached. It needs the programs spin and cc. The table in report.md is its output.
//
// A comment of a model that begins with @ names a transition that can be seen from outside. Package internal/trace
// has it by the same name, and checks that runs of the code are runs of the model.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/lab/provenance"
)

var (
	only   = flag.String("only", "", "check only the models whose names contain this `text`")
	report = flag.String("report", "", "also write the table to this `file`")
)

// bounds says how much the searches prove.
const bounds = `Each search covers every interleaving within the bounds of its model: two or three messages or calls, a few
processes, and one to three faults. A model proves nothing about the code that it leaves out; its head comment lists that.`

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "models:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	began := time.Now()
	head := provenance.Head(strings.Join(append([]string{"go run ./internal/lab/models"}, os.Args[1:]...), " "), began)
	if missing := missingProgram(); missing != "" {
		return fmt.Errorf("program %s is missing (apt-get install spin gcc)", missing)
	}
	models, err := readModels(*only)
	if err != nil {
		return err
	}
	rows, err := checkAll(ctx, models)
	text := table(rows)
	fmt.Print(text)
	fmt.Printf("%d rows in %v\n", len(rows), time.Since(began).Round(time.Second))
	if err != nil || *report == "" {
		return err
	}
	return os.WriteFile(*report, []byte("# Models\n\n"+head+"\n\n"+bounds+"\n\n"+text), 0o644)
}
