// Package prove runs a piece of work of a user on a real database, once for each place at which it can
// be interrupted, and compares what it leaves there with what an undisturbed run leaves. The Prove
// functions of the fakes' packages are made of it.
package prove
