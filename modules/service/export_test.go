package service

// Refusal is for tests.
var Refusal = refusal
