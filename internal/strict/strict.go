// Package strict says whether the code checks its own invariants.
package strict

// On makes code panic at a state that it must never reach. testenv.Run sets it before the tests of a package start;
// programs run without the checks.
var On bool
