// Package strict has a switch for checks of internal invariants.
package strict

// On makes code panic at a state that must never occur. testenv.Run sets it before the tests of a package start. In
// programs it is false.
var On bool
